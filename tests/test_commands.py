import dataclasses
import subprocess
import sys

import pytest

from streamclr.cli import commands
from streamclr.cli.entry import COMMANDS


def test_every_command_is_on_the_command_line():
    made = {name for name in vars(commands) if name.endswith("_command")}
    assert made == {c.place.partition(":")[2] for c in COMMANDS.values() if c.place.startswith("cli.commands:")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_what_the_table_says(name):
    command = COMMANDS[name]
    assert command.summary == command.config.__doc__.splitlines()[0]
    assert set(command.positional) <= {field.name for field in dataclasses.fields(command.config)}


def test_help_imports_nothing_large():
    script = (
        "import sys\nfrom streamclr.cli.entry import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "large = {'torch', 'numpy', 'rich', 'PIL', 'matplotlib'} & set(sys.modules)\nassert not large, large\n"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
