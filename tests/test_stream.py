import itertools

import pytest
import torch
from PIL import Image

from streamclr import UserError, open_stream


def test_segments_of_any_size_in_order():
    whole = open_stream("synthetic:").read(60)
    for n in (1, 7, 60, 100):
        parts = torch.cat(list(open_stream("synthetic:").segments(n, until=60)))
        assert torch.equal(parts, whole)
    assert whole.dtype == torch.uint8
    assert whole.shape == (60, 3, 32, 32)


def test_options_in_the_string_and_as_keywords():
    a = open_stream("synthetic:?seed=3&size=16&stc=5")
    b = open_stream("synthetic", seed=3, size="16", stc=5)
    c = open_stream("synthetic:?seed=1&size=16&stc=5", seed=3)
    assert torch.equal(a.read(20), b.read(20))
    assert torch.equal(a.read(20), c.read(40)[20:])
    assert open_stream("synthetic:", stc=None).source.stc == 100  # None is the source's own


def test_keywords_left_out_do_not_hide_what_the_string_says():
    source = open_stream("synthetic:?size=16&stc=7", size=None, stc=None).source
    assert (source.size, source.stc) == (16, 7)


def test_state_resumes():
    stream = open_stream("synthetic:?stc=3")
    next(stream.segments(11))
    other = open_stream("synthetic:?stc=3")
    other.load_state_dict(stream.state_dict())
    for a, b in itertools.islice(zip(stream.segments(5), other.segments(5), strict=False), 4):
        assert torch.equal(a, b)


def test_a_directory_alone_is_a_folder(tmp_path):
    Image.new("RGB", (16, 16), (1, 2, 3)).save(tmp_path / "a.png")
    assert open_stream(str(tmp_path)).read(1)[0, :, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("cifar11", "did you mean 'cifar10'"),
        ("no/such/place", "no file no/such/place: there is no directory no"),
        ("folder:no/such/place", "no directory 'no/such/place'"),
        ("folder:", "folder:DIR"),
        ("synthetic:?sed=1", "did you mean 'seed'"),
        ("synthetic:?stc=many", "'many': use a whole number"),
        ("synthetic:?stc=0", "stc is 0"),
        ("synthetic:?size=2", "size is 2"),
        ("synthetic:?size=100000000", "size is 100000000"),
        ("synthetic:?stc=99999999999999999999", "stc is 9999"),
        ("synthetic:?seed=-1", "seed is -1"),
        ("synthetic:?stc", "key=value"),
        ("synthetic:elsewhere", "takes no path"),
        ("cifar10", "streamclr data get cifar10"),
        ("", "the source is empty: give a file"),
    ],
)
def test_bad_sources(source, told, monkeypatch, tmp_path):
    monkeypatch.setenv("STREAMCLR_DATA", str(tmp_path))
    with pytest.raises(UserError, match=told.replace("?", r"\?")) as error:
        open_stream(source)
    assert "\n" not in str(error.value)


def test_bad_segment_size():
    with pytest.raises(UserError, match="segment size is 0"):
        open_stream("synthetic:").segments(0)
