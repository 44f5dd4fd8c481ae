import json
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from streamclr import UserError, open_stream
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory
from streamclr.runs.serving import PredictingStream
from streamclr.streams.account import Account
from streamclr.streams.stream import CameraStream
from support.camera import jpeg, write_clip
from support.images import make_folder
from support.labelling import CLASSES, make_run, make_version
from support.waiting import until


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(make_run(tmp_path / "run"))


@pytest.fixture
def served(directory):
    served = Versions(directory)
    served.take(make_version(directory), None)
    return served


def predicting(source, served, **options):
    return PredictingStream(open_stream(source, **options), served, served.directory.path / "predictions.jsonl")


def lines(served):
    file = served.directory.path / "predictions.jsonl"
    content = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]


def numbers(served):
    return [line["image"] for line in lines(served)]


SYNTHETIC = "synthetic:?size=16&stc=7"


def test_the_segments_are_those_of_the_stream_and_every_frame_has_a_line(served):
    plain = list(open_stream(SYNTHETIC).segments(9, until=100))
    stream = predicting(SYNTHETIC, served)
    found = list(stream.segments(9, until=100))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert numbers(served) == list(range(100))
    probabilities, labels = served.current.probabilities(torch.cat(found)).max(1)
    assert [line["class"] for line in lines(served)] == [CLASSES[i] for i in labels]
    told = torch.tensor([line["probability"] for line in lines(served)])
    assert torch.allclose(told, probabilities, atol=1e-4)
    assert {line["version"] for line in lines(served)} == {1}
    assert {line["source"] for line in lines(served)} == {"synthetic"}
    assert stream.account == stream.stream.account == Account(100, 100, predicted=100)
    assert stream.position == stream.stream.position == 100


def test_tracks_are_those_of_the_segment_that_the_learner_has(served, tmp_path):
    """The reader is ahead of it, and the scenes of a camera are known for its last segment only."""
    pytest.importorskip("av")
    files = [write_clip(tmp_path / f"{name}.mp4", n) for name, n in (("a", 40), ("b", 30))]
    (tmp_path / "both.txt").write_text("\n".join(map(str, files)))
    plain, stream = open_stream(tmp_path / "both.txt", size=16), predicting(tmp_path / "both.txt", served, size=16)
    expected, found = [], []
    for one, tracks in ((plain, expected), (stream, found)):
        for images in one.segments(16):
            if one is stream:
                until(lambda: stream._ready or stream._reader.done())
            tracks.append(one.tracks(torch.arange(one.position - len(images), one.position)).tolist())
    assert [len(tracks) for tracks in expected] == [16] * 4 + [6]
    assert found == expected


def test_before_there_is_a_head_the_class_is_null(directory):
    served = Versions(directory)
    assert len(list(predicting(SYNTHETIC, served).segments(8, until=16))) == 2
    assert len(lines(served)) == 16
    assert all(line[name] is None for line in lines(served) for name in ("class", "probability", "version"))


def test_it_reads_one_segment_ahead_while_the_learner_learns_and_no_more(served):
    stream = predicting(SYNTHETIC, served)
    segments = stream.segments(8, until=80)
    for n in (8, 16, 24):
        next(segments)
        until(lambda n=n: len(lines(served)) == n + 8)  # while this thread "trains"
        assert stream.position == stream.account.learned == stream.account.predicted == n
    time.sleep(0.3)
    assert len(lines(served)) == 32
    assert stream.state_dict()["position"] == 24
    segments.close()
    assert numbers(served) == list(range(24))  # what was ahead is taken back
    assert stream.stream.position == 24


def test_a_new_version_is_used_from_the_next_frames_on(served, directory):
    stream = predicting(SYNTHETIC, served)
    segments = stream.segments(8, until=40)
    next(segments)
    until(lambda: len(lines(served)) == 16)
    served.take(make_version(directory, seed=3), served.current)
    assert len(list(segments)) == 4
    assert [line["version"] for line in lines(served)] == [1] * 16 + [2] * 24


@pytest.mark.parametrize("source", [SYNTHETIC, "clip"])
def test_after_a_stop_at_any_point_none_is_missing_and_none_twice(served, tmp_path, source):
    if source == "clip":
        pytest.importorskip("av")
        source = f"{write_clip(tmp_path / 'clip.mp4', n=49)}?every=2"  # its last frame is the last that is taken
    plain = open_stream(source, size=16)
    whole = torch.cat(list(plain.segments(4, until=25)))
    found, state = [], None
    for n in (1, 2, 1, 9):
        stream = predicting(source, served, size=16)
        if state:
            stream.load_state_dict(state)
        segments = stream.segments(4, until=25)
        for i, images in enumerate(segments, 1):
            found.append(images)
            if i == n:
                break
        state = json.loads(json.dumps(stream.state_dict()))
        if n == 2:  # as after a kill: lines of frames that the saved state does not know, and a broken one
            until(lambda: len(lines(served)) == 16)
            with (served.directory.path / "predictions.jsonl").open("a") as file:
                file.write('{"image": 1')
            left = (served.directory.path / "predictions.jsonl").read_bytes()
            segments.close()
            (served.directory.path / "predictions.jsonl").write_bytes(left)
        else:
            segments.close()
    assert torch.equal(torch.cat(found), whole)
    assert numbers(served) == list(range(25))
    assert stream.account.state_dict() == plain.account.state_dict() | {"predicted": 25}


def test_images_that_cannot_be_read_have_no_line_and_no_number(served, tmp_path):
    folder = make_folder(tmp_path / "images")
    for number in (3, 4, 19):
        (folder / "ant" / f"{number}.png").write_bytes(b"junk")
    stream = predicting(f"folder:{folder}", served)
    assert sum(map(len, stream.segments(8))) == 37
    assert numbers(served) == list(range(37))
    assert stream.account.received == 40
    assert stream.account.predicted == stream.account.classifiable == stream.account.learned == 37
    assert stream.labels(torch.arange(37)).tolist() == open_all(folder).tolist()
    files = [folder / name / f"{number}.png" for name in ("ant", "bee") for number in range(20)]
    good = [str(file) for file in files if file.read_bytes() != b"junk"]
    assert [line["file"] for line in lines(served)] == good


def open_all(folder):
    stream = open_stream(f"folder:{folder}")
    stream.read(100)
    return stream.labels(torch.arange(37))


def test_an_error_of_the_source_is_raised_where_the_segments_are_asked_for(served, tmp_path):
    folder = make_folder(tmp_path / "images", n=4)
    for file in folder.glob("*/*.png"):
        file.write_bytes(b"junk")
    stream = PredictingStream(open_stream(f"folder:{folder}?size=16"), served, served.directory.path / "p.jsonl")
    with pytest.raises(UserError, match="not one image of a whole pass can be read"):
        list(stream.segments(4))


def test_a_bug_in_the_thread_is_raised_too_and_nothing_hangs(served, monkeypatch):
    stream = predicting(SYNTHETIC, served)
    segments = stream.segments(8)
    next(segments)
    monkeypatch.setattr("streamclr.models.versions.Version.probabilities", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(segments)
    assert numbers(served) == list(range(len(numbers(served))))


def test_whoever_says_so_while_waiting_ends_it(served, monkeypatch):
    held, asked = threading.Event(), []

    def read(self, n, until=None):
        held.wait()
        return torch.empty(0, 3, 16, 16, dtype=torch.uint8)

    def idle():
        asked.append(held.is_set())
        if len(asked) == 2:
            held.set()  # or its thread would never end
        return held.is_set()

    monkeypatch.setattr("streamclr.streams.stream.DatasetStream.read", read)
    stream = predicting(SYNTHETIC, served)
    assert list(stream.segments(8, idle=idle)) == []
    assert asked == [False, False]


def test_a_full_disk_costs_lines_and_the_account_knows(served, monkeypatch, capsys):
    import os

    real, n_left = os.write, [3]

    def write(fd, content):
        if "predictions.jsonl" in os.readlink(f"/proc/self/fd/{fd}"):
            n_left[0] -= 1
            if n_left[0] < 0:
                raise OSError(28, "No space left on device")
        return real(fd, content)

    monkeypatch.setattr("streamclr.records.journal.os.write", write)
    stream = predicting(SYNTHETIC, served)
    assert sum(map(len, stream.segments(8, until=80))) == 80
    assert stream.account.predicted == len(lines(served)) == 24
    assert stream.account.classifiable == 80
    assert "predictions.jsonl cannot be written (No space left on device)" in capsys.readouterr().err


def test_the_learners_threads_are_its_own(served):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stream = predicting(SYNTHETIC, served)
        segments = stream.segments(8, until=40)
        next(segments)
        until(lambda: len(lines(served)) == 16)
        assert torch.get_num_threads() == 2
        segments.close()
        of_new_threads = []
        thread = threading.Thread(target=lambda: of_new_threads.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert of_new_threads == [2]
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------------------
# What does not wait: cameras.


def check(stream, served):
    account = stream.account
    assert account.is_balanced
    assert account.predicted == account.classifiable == len(lines(served))
    assert numbers(served) == list(range(account.predicted))


def test_a_camera_faster_than_the_learner(served, camera):
    source = camera(fps=150)
    stream = predicting(source.url, served, size=16)
    n = 0
    for images in stream.segments(8, until=80):
        n += len(images)
        target = len(lines(served)) + 24  # a learner that takes its time, as long as three segments
        until(lambda target=target: len(lines(served)) >= target)
    assert n == stream.position == stream.account.learned == 80
    assert stream.account.passed["learner busy"] >= 8 * 9
    check(stream, served)


def test_frames_of_a_camera_are_classified_before_they_are_a_segment(served, camera):
    source = camera(fps=100, last=20)  # and then silent
    stream = predicting(source.url, served, size=16, timeout=30)
    deadline = time.monotonic() + 120
    is_over = lambda: len(lines(served)) == 20 or time.monotonic() > deadline  # noqa: E731
    assert list(stream.segments(64, idle=is_over)) == []
    check(stream, served)
    assert stream.account.passed["learner stopped"] == 20
    assert stream.account.learned == 0
    assert {line["source"] for line in lines(served)} == {source.url}


def test_a_camera_that_is_stopped_goes_on_with_the_next_number(served, camera):
    source = camera(fps=200)
    state, learned = None, 0
    for _ in range(3):
        stream = predicting(source.url, served, size=16)
        if state:
            stream.load_state_dict(state)
        segments = stream.segments(8)
        for _ in range(3):
            learned += len(next(segments))
        start = len(lines(served))
        until(lambda start=start: len(lines(served)) > start + 3)
        segments.close()
        state = stream.state_dict()
        check(stream, served)
        assert stream.account.learned == stream.position == learned


def test_a_source_that_drops_and_ends_is_learned_from_to_its_end(served, tmp_path):
    pytest.importorskip("av")
    clip = write_clip(tmp_path / "clip.mp4", n=20)
    stream = predicting(f"{clip}?overload=drop", served, size=16)
    n = sum(map(len, stream.segments(64)))
    assert n == 20
    check(stream, served)


def test_frames_of_several_cameras_say_whose_they_are(served, camera, tmp_path):
    urls = [camera(fps=100).url for _ in range(2)]
    (tmp_path / "cameras.txt").write_text("\n".join(url.replace("//", "//me:secret@") for url in urls))
    stream = predicting(tmp_path / "cameras.txt", served, size=16)
    with closing(stream.segments(8)) as segments:
        for _ in segments:  # one of the two may begin long before the other
            if stream.position >= 80 and len({line["source"] for line in lines(served)}) == 2:
                break
    check(stream, served)
    assert {line["source"] for line in lines(served)} == {url.replace("//", "//me:***@") for url in urls}


def test_frames_of_several_recordings_say_whose_they_are(served, tmp_path):
    pytest.importorskip("av")
    clips = [write_clip(tmp_path / f"{i}.mp4", n=n) for i, n in enumerate((12, 20))]
    (tmp_path / "clips.txt").write_text("\n".join(map(str, clips)))
    found = torch.cat(list(predicting(tmp_path / "clips.txt", served, size=16).segments(8)))
    assert numbers(served) == list(range(32))
    sources = [line["source"] for line in lines(served)]
    assert [sources.count(str(clip)) for clip in clips] == [12, 20]
    _, labels = served.current.probabilities(found).max(1)  # lines are in the order of the segments
    assert [line["class"] for line in lines(served)] == [CLASSES[i] for i in labels]


def test_a_watched_directory_waits_and_goes_on(served, tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(20):
        (tmp_path / "in" / f"{i:03}.jpg").write_bytes(jpeg(i))
    state = None
    for part in range(2):
        stream = predicting(f"watch:{tmp_path / 'in'}", served, size=16)
        if state:
            stream.load_state_dict(state)
        segments = stream.segments(4)
        for _ in range(2 if part == 0 else 3):
            assert len(next(segments)) == 4
        segments.close()
        state = stream.state_dict()
        check(stream, served)
    assert numbers(served) == list(range(20))
    assert stream.account.learned == 20
    assert [line["file"] for line in lines(served)] == [str(tmp_path / "in" / f"{i:03}.jpg") for i in range(20)]
    assert {line["source"] for line in lines(served)} == {str(tmp_path / "in")}


def test_sources_that_wait_and_others_that_do_not_are_refused_together(served, tmp_path, camera):
    (tmp_path / "in").mkdir()
    (tmp_path / "list.txt").write_text(f"watch:{tmp_path / 'in'}\n{camera().url}\n")
    with pytest.raises(UserError, match="give the same overload, wait or drop, to all of them"):
        predicting(tmp_path / "list.txt", served, size=16)
    stream = predicting(tmp_path / "list.txt", served, size=16, overload="drop")
    assert isinstance(stream.stream, CameraStream)


# ----------------------------------------------------------------------------------------------------------------------


def test_what_it_hands_on(served):
    stream = predicting(SYNTHETIC, served)
    assert (stream.live, stream.exact, stream.overload, stream.size) == (False, True, "wait", 16)
    inner = stream.stream
    assert (stream.n_images, stream.epoch, stream.classes) == (inner.n_images, inner.epoch, inner.classes)
    assert (stream.train, stream.test) == (inner.train, inner.test)
    assert stream.connections() == {}
    assert stream.take_events() == []
    with pytest.raises(UserError, match="segment size is 0"):
        stream.segments(0)
    assert SimpleNamespace(**stream.state_dict()).position == 0
