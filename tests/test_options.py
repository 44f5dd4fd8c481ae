import pytest

from streamclr import UserError
from streamclr.options import build, convert, one_of, split


class Thing:
    def __init__(self, size: int | None = None, rate: float = 1.0, name: str = "x"):
        self.values = (size, rate, name)


def test_split():
    assert split("cifar10?stc=500&seed=1") == ("cifar10", {"stc": "500", "seed": "1"})
    assert split("plain") == ("plain", {})
    with pytest.raises(UserError, match="key=value"):
        split("a?b")


def test_build_converts_text_by_annotation():
    assert build(Thing, {"size": "3", "rate": "2", "name": "5"}, "thing").values == (3, 2.0, "5")
    assert build(Thing, {"size": 3}, "thing").values == (3, 1.0, "x")
    with pytest.raises(UserError, match="thing, option size is 'a': use a whole number"):
        build(Thing, {"size": "a"}, "thing")
    with pytest.raises(UserError, match=r"thing has no option 'sise': did you mean 'size'\? use size, rate, name"):
        build(Thing, {"sise": 1}, "thing")


def test_convert_names_what_is_wrong():
    assert convert("0.5", float, "x") == 0.5
    with pytest.raises(UserError, match="--lr is 'fast': use a number"):
        convert("fast", float, "--lr")


def test_one_of_has_the_likeliest_first():
    assert one_of("contrst", ["fifo", "contrast"]) == "did you mean 'contrast'? use fifo, contrast"
    assert one_of("zzz", ["fifo"]) == "use fifo"
