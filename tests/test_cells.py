import csv
import io

import pytest

from streamclr.base import cells as cell


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "'", "'=x", "cat", "", "a=b", "Äpfel", "x,y"])
def test_what_is_written_is_read_and_is_no_formula(text):
    written = cell.written(text)
    assert not written.startswith(("=", "+", "-", "@"))
    assert cell.read(written) == text
    out = io.StringIO()
    csv.writer(out).writerow([written])
    if text:
        assert cell.read(next(csv.reader(io.StringIO(out.getvalue())))[0]) == text


def test_numbers_stay_numbers():
    assert cell.written(-0.5) == -0.5
