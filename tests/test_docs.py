"""What the documentation says is there: commands parse, links lead somewhere, programs run, names are in the code."""

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

import streamclr
from streamclr.cli.parser import parse
from streamclr.policy import POLICIES
from support.commands import COMMANDS
from support.images import random_images

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.ipynb"))]


def text_of(page):
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def commands(page):
    """The words after `streamclr` in blocks of code that are no program."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE):
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
    for link in re.findall(r"\]\(([^)#\s]+)", text_of(page)):
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


def test_the_page_of_the_api_names_all_that_is_public():
    _, _, names = (ROOT / "docs" / "api.md").read_text().partition("## Names")
    names, _, _ = names.partition("\n## ")
    assert sorted(re.findall(r"`(\w+)`", names)) == streamclr.__all__


def test_the_page_of_policies_has_their_arguments():
    rows = re.findall(
        r"^\| `([\w-]+)` \| `(\w+)\((.*?)\)` \|", (ROOT / "docs" / "policies.md").read_text(), re.MULTILINE
    )
    assert [name for name, _, _ in rows] == list(POLICIES)
    for name, shown, arguments in rows:
        assert POLICIES[name].__name__ == shown
        parameters = inspect.signature(POLICIES[name]).parameters.values()
        assert arguments.replace('"', "'") == ", ".join(f"{one.name}={one.default!r}" for one in parameters)


def test_the_page_of_the_paper_names_what_is_in_the_files():
    """Each name stands behind a link to the file that has it."""
    page = (ROOT / "docs" / "paper.md").read_text()
    linked = re.findall(r"\]\(\.\./([\w/]+\.py)\):([^;|\[]*)", page)
    assert len(linked) >= 10
    for file, names in linked:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`([^`]+)`", names):
            assert re.search(rf"\b{re.escape(name)}\b", source), f"{name} in {file}"


def test_the_page_of_the_paper_has_each_deviation():
    page, deviations = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("paper", "deviations"))
    numbers = {int(one) for row in re.findall(r"\| ([\d, ]+) \|$", page, re.MULTILINE) for one in row.split(",")}
    assert numbers == {int(one) for one in re.findall(r"^(\d+)\. ", deviations, re.MULTILINE)}
