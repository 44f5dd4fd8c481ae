import dataclasses
import subprocess
import sys

import pytest

from streamclr.cli.parser import HEADINGS
from streamclr.records.options import RunOptions
from support.commands import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_what_the_table_says(name):
    command = COMMANDS[name]
    fields = {field.name: field for field in dataclasses.fields(command.config)}
    assert all(field.type in (str, tuple[str, ...]) for field in fields.values() if field.metadata["positional"])
    assert all(field.metadata["help"] for field in fields.values())


def test_every_option_of_a_run_has_one_heading():
    headed = [name for names in HEADINGS.values() for name in names]
    assert len(headed) == len(set(headed))
    assert {field.name for field in dataclasses.fields(RunOptions)} <= set(headed)
    options = {field.name for command in COMMANDS.values() for field in dataclasses.fields(command.config)}
    assert set(headed) <= options


@pytest.mark.parametrize(
    ("words", "large"),
    [
        (["--help"], {"torch", "numpy", "rich", "PIL", "matplotlib"}),
        (["label", "--help"], {"torch", "numpy", "rich", "PIL", "matplotlib"}),
        (["predict", "--help"], {"torch", "matplotlib"}),
    ],
)
def test_help_imports_nothing_large(words, large):
    script = (
        f"import sys\nfrom streamclr.cli.entry import main\ntry:\n    main({words})\nexcept SystemExit:\n    pass\n"
        f"large = {large} & set(sys.modules)\nassert not large, large\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
