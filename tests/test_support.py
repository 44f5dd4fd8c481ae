import re
from pathlib import Path


def test_no_test_file_imports_another():
    """What several of them need is in tests/support."""
    for file in Path(__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (test_\w+|conftest)\b", file.read_text(), re.MULTILINE), file
