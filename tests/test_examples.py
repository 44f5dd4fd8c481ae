"""Every public name has an example in its docstring, and it prints what it says."""

import doctest

import pytest

import streamclr


@pytest.mark.parametrize("name", streamclr.__all__)
def test_its_example_runs(name):
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    (example,) = finder.find(getattr(streamclr, name), name, globs={})
    assert name in "".join(line.source for line in example.examples), "the docstring has no example of it"
    assert any(line.want for line in example.examples), "the example prints nothing"
    told = []
    assert not doctest.DocTestRunner().run(example, out=told.append).failed, "".join(told)
