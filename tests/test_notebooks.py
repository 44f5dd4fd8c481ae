"""The notebooks run from their first cell to their last, and say what the committed ones say, but for the numbers."""

import json
import re
from pathlib import Path

import pytest

from streamclr.base.errors import UserError
from streamclr.encoders.weights import pretrained_file

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


def executed(name, directory):
    """The notebook after a run in an empty directory. The kernel is reached through sockets in it."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    from traitlets.config import Config

    notebook = nbformat.read(NOTEBOOKS / name, 4)
    sockets = Config({"KernelManager": {"transport": "ipc", "connection_file": str(directory / "kernel.json")}})
    settings = {"timeout": 600, "startup_timeout": 600, "coalesce_streams": True, "config": sockets}
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(directory)}}, **settings).execute()
    return notebook


def printed(notebook):
    """The text of each cell's outputs."""
    return ["".join("".join(output["text"]) for output in cell.get("outputs", [])) for cell in notebook["cells"]]


def without_numbers(texts):
    return [re.sub(r" *\d+", "#", text) for text in texts]


def committed(name):
    return json.loads((NOTEBOOKS / name).read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_what_is_committed_is_small_and_has_run_in_order(name):
    notebook = committed(name)
    assert (NOTEBOOKS / name).stat().st_size < 20_000
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert {output["output_type"] for cell in code for output in cell["outputs"]} == {"stream"}


@pytest.mark.system
def test_a_policy_of_your_own(tmp_path):
    found = printed(executed("own-policy.ipynb", tmp_path))
    assert without_numbers(found) == without_numbers(printed(committed("own-policy.ipynb")))
    accuracies = [int(number) for number in re.findall(r"(\d+) %", found[-2])]
    assert len(accuracies) == 4
    assert min(accuracies) > 20  # of ten classes


@pytest.mark.system
def test_adapt_a_public_encoder_to_a_clip(tmp_path):
    pytest.importorskip("av")
    try:
        pretrained_file("mobilenet_v2")
    except UserError as error:
        pytest.skip(f"no public weights here: {error}")
    found = printed(executed("adapt.ipynb", tmp_path))
    assert without_numbers(found) == without_numbers(printed(committed("adapt.ipynb")))
    before, after = (int(number) for number in re.findall(r"(\d+) % on", "".join(found)))
    assert after > before
