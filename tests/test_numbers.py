import numpy as np
import pytest
import torch

from streamclr.base.statistics import evenly_spaced


@pytest.mark.parametrize("most", [1, 2, 64, 256, 1000, 2048, 5000, 10_000])
def test_the_indices_are_those_that_torch_gives(most):
    for n in (1, 2, 3, 40, 255, 2000, 5001, 9999, 10_000, 26_032, 50_000, 73_257, 100_000, 1_281_167):
        expected = torch.linspace(0, n - 1, min(n, most)).long().numpy()
        np.testing.assert_array_equal(evenly_spaced(n, most), expected)


def test_there_may_be_none():
    assert evenly_spaced(0, 5).tolist() == []
    assert evenly_spaced(0, 5).dtype == np.int64
