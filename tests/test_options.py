import pytest

from streamclr import UserError
from streamclr.base.options import build, convert, one_of, redacted, split


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rtsp://user:secret@host/1", "rtsp://user:***@host/1"),
        ("rtsp://user:se@cret@host:554/1", "rtsp://user:***@host:554/1"),
        ("rtsp://user:12!34@host", "rtsp://user:***@host"),
        ("rtsp://user:se/cret?@host/1", "rtsp://user:***@host/1"),
        ("rtsp://:secret@host/1", "rtsp://:***@host/1"),
        ("http://host/1?token=secret", "http://host/1?token=***"),
        ("http://host/1?size=64&password=se/cr,et&fps=5", "http://host/1?size=64&password=***&fps=5"),
        ("http://host/1?Access_Token=secret#top", "http://host/1?Access_Token=***#top"),
        ("rtsp://host/user=admin&password=secret&channel=1", "rtsp://host/user=admin&password=***&channel=1"),
        ("rtsp://host/user=admin_password=secret_channel=1.sdp", "rtsp://host/user=admin_password=***"),
        ("rtsp://a:secret@h/1,rtsp://b:secret@i/2", "rtsp://a:***@h/1,rtsp://b:***@i/2"),
        ("http://h/?key=secret,http://i/?key=secret", "http://h/?key=***,http://i/?key=***"),
        ("lost 'rtsp://a:secret@h/1' and rtsp://b:secret@i", "lost 'rtsp://a:***@h/1' and rtsp://b:***@i"),
        ("no source 'http://h/1?token=secret': use folder", "no source 'http://h/1?token=***': use folder"),
    ],
)
def test_redacted_shows_no_secret(text, shown):
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cifar10?stc=500&seed=1",
        "folder:images/a@b",
        "rtsp://host/1",
        "rtsp://user@host/1",
        "rtsp://host:554/live@2",
        "rtsp://[::1]:554/live@2",
        "http://host:80/?fps=3",
        "contrast?rescore_every=50",
        "video:clip.mp4?passes=2&fit=stretch",
    ],
)
def test_redacted_leaves_the_rest_alone(text):
    assert redacted(text) == text
