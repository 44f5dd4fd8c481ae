"""The commands in the documentation are commands: each parses, and each link leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from streamclr.cli.parser import parse
from support.commands import COMMANDS
from support.images import random_images

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page):
    """The words after `streamclr` in blocks of code that are no program."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if not language:
            for line in block.splitlines():
                for found in re.finditer(r"(?:^|[\s/])streamclr ([a-z][^|]*)", line.partition(" #")[0]):
                    yield shlex.split(found[1].replace("…", "x"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page):
    for words in commands(page):
        _, config = parse(words)
        names = (" ".join(words[:2]), words[0], f"{words[0]} page")
        command = next(COMMANDS[name] for name in names if name in COMMANDS)
        assert isinstance(config, command.config)


def test_commands_are_found():
    pages = [page for page in PAGES if page.parent.name == "targets"]
    assert len(pages) == 4
    for page in pages:
        assert {"run", "label", "export", "predict"} <= {words[0] for words in commands(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("name", ["own-parts", "own-data"])
def test_programs_run(name):
    """Block after block, as somebody would try them."""
    page, known = ROOT / "docs" / f"{name}.md", {}
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), known)
        if "learner" in known:
            assert known["learner"].learn_many(random_images(64, 32)).loss > 0
