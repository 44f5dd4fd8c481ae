import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from streamclr import UserError, open_stream
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from streamclr.streams.account import MAX_NAMED, Account
from streamclr.streams.frame import BadFrame, Frame
from streamclr.streams.stream import CameraStream
from support.camera import RtspCamera, jpeg, number_of, write_clip
from support.waiting import until

av = pytest.importorskip("av")
pytestmark = pytest.mark.system  # each camera is a process


def numbers(images):
    return [number_of(image) for image in images]


def test_a_clip_is_played_frame_by_frame_and_ends(tmp_path):
    stream = open_stream(write_clip(tmp_path / "clip.mp4"), size=32)
    assert stream.fps == 30
    segments = list(stream.segments(25))
    assert [len(segment) for segment in segments] == [25, 25, 10]
    assert segments[0].shape == (25, 3, 32, 32)
    assert segments[0].dtype == torch.uint8
    assert numbers(torch.cat(segments)) == list(range(60))
    assert stream.position == stream.account.learned == stream.account.received == 60


@pytest.mark.parametrize(
    ("options", "due", "passed"),
    [
        ("every=7", list(range(0, 60, 7)), {"every": 51}),
        ("fps=10", list(range(0, 60, 3)), {"fps": 40}),
        ("fps=15&every=2", list(range(0, 60, 2)), {"every": 30}),
    ],
)
def test_fewer_frames_and_all_in_the_account(tmp_path, options, due, passed):
    stream = open_stream(f"{write_clip(tmp_path / 'clip.mp4')}?{options}", size=32)
    found = [number for images in stream.segments(16) for number in numbers(images)]
    assert found == due
    assert dict(stream.account.passed) == passed
    assert stream.account.received == 60
    assert stream.account.is_balanced


@pytest.mark.parametrize("options", ["", "every=2", "every=3&fps=7", "fps=13", "passes=2&every=4", "passes=3&fps=4"])
def test_a_clip_goes_on_where_it_was(tmp_path, options):
    source = f"{write_clip(tmp_path / 'clip.mp4')}?{options}"
    stream = open_stream(source, size=32)
    whole = [numbers(images) for images in stream.segments(3)]
    for stop in (1, 2):
        found, state = [], None
        for _ in range(0, len(whole), stop):
            again = open_stream(source, size=32)
            if state:
                again.load_state_dict(state)
            segments = again.segments(3)
            found += [numbers(images) for _, images in zip(range(stop), segments, strict=False)]
            segments.close()
            state = json.loads(json.dumps(again.state_dict()))
            if len(found) > 8:
                break
        assert found[:8] == whole[:8]
    rest = open_stream(source, size=32)
    rest.load_state_dict(state)
    found += [numbers(images) for images in rest.segments(3)]
    assert found == whole
    assert rest.account == stream.account


def test_a_clip_is_passed_over_several_times(tmp_path):
    clip = write_clip(tmp_path / "clip.mp4", n=20)
    stream = open_stream(clip, size=32, passes=3)
    assert [n for images in stream.segments(16) for n in numbers(images)] == [*range(20)] * 3
    assert stream.account.learned == 60
    # At 10 frames a second of 30: in time from pass to pass.
    thinned = [n for images in open_stream(clip, size=32, passes=2, fps=10).segments(16) for n in numbers(images)]
    assert thinned == [0, 3, 6, 9, 12, 15, 18, 1, 4, 7, 10, 13, 16, 19]


def test_a_clip_of_an_earlier_checkpoint_goes_on(tmp_path):
    """Whose mark was the number of frames alone."""
    stream = open_stream(write_clip(tmp_path / "clip.mp4", n=20), size=32)
    state = stream.state_dict()
    stream.load_state_dict(state | {"position": 12, "places": [[12, 0.0, 12]]})
    assert [n for images in stream.segments(16) for n in numbers(images)] == [*range(12, 20)]


def test_a_clip_that_ends_before_its_images_says_so_and_is_learned_from(tmp_path):
    clip = write_clip(tmp_path / "clip.mp4", n=20)
    options = {"size": 32, "images": 50, "buffer": 8, "width": 1}
    path, results = run(RunOptions(source=str(clip), **options, out=str(tmp_path / "run")))
    assert results["images"] == 20
    events = [json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()]
    told = "the source has ended after {} of the 50 images asked for: write passes=3 in the source for more"
    assert events == [told.format(20)]
    path, results = run(RunOptions(source=f"{clip}?passes=2", **options, out=str(tmp_path / "twice")))
    assert results["images"] == 40
    assert told.format(40) in (path / "events.jsonl").read_text()
    path, results = run(RunOptions(source=f"{clip}?passes=3", **options, out=str(tmp_path / "thrice")))
    assert results["images"] == 50
    assert not (path / "events.jsonl").exists()


def test_several_recordings_meet_in_an_order_that_is_always_the_same(tmp_path):
    clips = [write_clip(tmp_path / f"{i}.mp4", n) for i, n in enumerate((20, 45, 30))]
    (tmp_path / "all.txt").write_text("# cameras\n" + "\n".join(map(str, clips)))
    orders = []
    for _ in range(3):
        stream = open_stream(tmp_path / "all.txt", size=32)
        orders.append([numbers(images) for images in stream.segments(16)])
        assert stream.account.learned == 95
    assert orders[0] == orders[1] == orders[2]
    assert [len(segment) for segment in orders[0]] == [16] * 5 + [15]


def test_several_recordings_go_on_in_the_same_order(tmp_path):
    """Also after one has ended, just where a segment does."""
    clips = [write_clip(tmp_path / f"{i}.mp4", n) for i, n in enumerate((30, 10, 30))]
    (tmp_path / "all.txt").write_text("\n".join(map(str, clips)))
    whole = [numbers(images) for images in open_stream(tmp_path / "all.txt", size=32).segments(16)]
    found, state = [], None
    for _ in whole:
        stream = open_stream(tmp_path / "all.txt", size=32)
        if state:
            stream.load_state_dict(state)
        segments = stream.segments(16)
        found.append(numbers(next(segments)))
        segments.close()
        state = json.loads(json.dumps(stream.state_dict()))
    assert found == whole
    assert list(map(len, whole)) == [16, 16, 16, 16, 6]
    assert whole[2] == [*range(12, 20), *range(10, 18)]  # the two that are left share it


def test_a_damaged_clip_gives_what_can_be_decoded(tmp_path):
    clip = write_clip(tmp_path / "clip.avi", codec="mjpeg")
    content = bytearray(clip.read_bytes())
    for start in range(8000, len(content) - 2000, 9000):
        content[start : start + 300] = bytes(300)
    clip.write_bytes(content)
    stream = open_stream(clip, size=32)
    found = [number for images in stream.segments(16) for number in numbers(images)]
    assert 40 < len(found) < 60
    assert None not in found
    assert found == sorted(set(found))  # no frame is taken for another
    assert stream.account.rejected.keys() == {"damaged"}
    assert stream.account.is_balanced
    events = stream.take_events()
    assert len(events) == min(MAX_NAMED, stream.account.rejected.total())
    assert all(event.startswith("rejected: a frame of the video cannot be used, damaged: ") for _, event in events)
    clip.write_bytes(b"junk" * 100)
    with pytest.raises(UserError, match="cannot play"):
        open_stream(clip)


def test_a_camera_over_http(camera):
    source = camera(fps=100, last=90)
    stream = open_stream(f"{source.url}?id=7", size=32)
    assert stream.feeds[0].where.endswith("?id=7")
    found = numbers(torch.cat(list(stream.segments(30, until=90))))
    assert found == list(range(90))
    assert stream.account.is_balanced
    assert not stream._captures


def test_regions_of_a_camera_over_one_connection(camera):
    """It serves one client at a time, as many cameras do."""
    source = camera(fps=100, last=60)
    regions = "a:0,0,100%,100%;b:0,0,64,64"
    stream, arrived = open_stream(f"{source.url}#regions={regions}"), []
    segments = list(stream.segments(40, until=120, arrived=lambda images, name, _: arrived.append((name, len(images)))))
    found = [[number for images in segments for number in numbers(images)[start : start + 20]] for start in (0, 20)]
    assert found == [list(range(60)), list(range(60))]
    assert [sum(n for name, n in arrived if name == f"{source.url}#{region}") for region in "ab"] == [60, 60]
    assert stream.account.received == stream.account.learned == 120
    assert source.n_sent == 60
    assert stream.take_told() == [f"{source.url}#{r}: sees all of each 64x64 frame, 64x64 at 0,0" for r in "ab"]


FAULTS = ["reset", "stall", "cut", "close", "resolution", "page", "junk", "away"]


@pytest.mark.parametrize("n_faults", [8, pytest.param(50, marks=pytest.mark.long)])
def test_a_camera_that_drops_comes_back(camera, n_faults):
    """Back in time after every fault, with no invented frame, and no more threads or descriptors than before."""
    timeout = 1.0
    source = camera(fps=100, faults=[(20, FAULTS[i % len(FAULTS)]) for i in range(n_faults)])
    stream = open_stream(source.url, size=32, timeout=timeout)
    arrived, found, resources, segments = [], [], [], stream.segments(4)
    for images in segments:
        arrived.append(time.monotonic())
        found += numbers(images)
        if len(arrived) in (3, 4) or not source.faults:
            resources.append(_resources(stream._captures[0]._process.pid))
        if not source.faults and arrived[-1] > source.fault_times[-1] + 1:
            break
    back = [min(t for t in arrived if t > fault) - fault for fault in source.fault_times]
    print(f"{n_faults} faults, back after {max(back):.2f} s at most, {max(resources[2:])} threads and descriptors")
    assert len(back) == n_faults
    assert max(back) < timeout + 5
    assert None not in found
    assert found == sorted(set(found))  # each once, in order, none made up
    assert max(found) <= source.n_sent  # one may be here before its sender has counted it
    assert max(resources[2:])[0] <= max(resources[:2])[0]
    assert max(r[1] for r in resources[2:]) <= max(r[1] for r in resources[:2]) + 1
    segments.close()
    assert stream.account.is_balanced
    events = [event for _, event in stream.take_events()]
    assert "frames again" in events
    assert any("timed out" in event or "no frame" in event for event in events)


def _resources(pid):
    """Threads and descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("fault", [{}, {"stall_after": 20}, {"close_after": 20}])
def test_a_camera_over_rtsp(fault):
    source = RtspCamera(**fault)
    timeout = 4 if "stall_after" in fault else 30  # seconds that this machine may be busy with something else
    try:
        stream = open_stream(source.url.replace("//", "//me:secret@"), size=32, timeout=timeout)
        segments = stream.segments(10)
        found = numbers(torch.cat([next(segments) for _ in range(6)]))
        events = stream.take_events()
        segments.close()
    finally:
        source.close()
    assert found == list(range(60))
    assert source.n_connections == 1 + bool(fault)
    assert stream.account.is_balanced
    assert len(events) == 2 * bool(fault)
    assert "secret" not in str(events)
    if "stall_after" in fault:
        assert "no frame for 4 s" in str(events)


def test_one_dead_camera_does_not_stop_the_others(camera, tmp_path):
    dead, alive = camera(), camera(fps=300, last=180)  # no more than can wait, should the learner be held up
    dead.hang_up()
    (tmp_path / "cameras.txt").write_text(f"{dead.url}\n{alive.url}\n")
    stream = open_stream(tmp_path / "cameras.txt", size=32)
    deadline, refused = time.monotonic() + 60, []

    def idle():
        refused.extend(event for _, event in stream.take_events() if "refused" in event)
        if refused:
            alive.last = 200  # the last frames come once the other camera has been missed, however late that is
        return time.monotonic() > deadline

    found = [number for images in stream.segments(20, until=200, idle=idle) for number in numbers(images)]
    assert found == list(range(200))
    assert refused


@pytest.mark.parametrize("speed", [1, 2, 10, 100])
@pytest.mark.parametrize("n_steps", [15, pytest.param(300, marks=pytest.mark.long)])
def test_too_many_frames_are_passed_over_and_counted(camera, speed, n_steps):
    """The learner takes five frames while so many times five come; the queue is bounded, memory flat, the account
    exact."""
    source = camera(fps=None, last=5)
    stream = open_stream(source.url, size=32, timeout=60)
    stream.feeds[0] = replace(stream.feeds[0], queue=32)  # full after six steps at twice the speed
    resident = []
    segments = stream.segments(5)
    for images in itertools.islice(segments, n_steps):
        assert None not in numbers(images)
        source.last += 5 * speed
        until(lambda: source.n_sent == source.last, seconds=60)  # the step
        pid = stream._captures[0]._process.pid
        resident.append(_resident(pid))
    capture = stream._captures[0]

    def all_captured():
        capture.ask(0)
        capture.look(True)
        return capture._captured == source.n_sent

    until(all_captured, seconds=60)  # what is on its way arrives
    segments.close()
    account = stream.account
    print(f"{speed} times as fast: {account}")
    assert account.is_balanced
    assert account.received == source.n_sent == 5 + 5 * speed * n_steps
    assert account.learned == stream.position == 5 * n_steps
    assert (account.passed["overload"] > 0) == (speed > 1)
    if n_steps > 100:
        assert resident[-1] < 1.01 * resident[len(resident) // 3]


def _resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def test_a_capture_process_that_hangs_is_replaced(camera, monkeypatch):
    monkeypatch.setattr("streamclr.streams.cameras.live.ANSWER_SECONDS", 0.5)
    source = camera(fps=100)
    stream = open_stream(source.url, size=32, timeout=1)
    segments = stream.segments(10)
    next(segments)
    monkeypatch.setattr("streamclr.streams.cameras.live.START_SECONDS", 20.0)
    first = stream._captures[0]._process
    stream._captures[0]._deadline = 0.0
    os.kill(first.pid, 19)  # SIGSTOP: it answers nothing any more
    assert None not in numbers(next(segments))
    assert stream._captures[0]._process.pid != first.pid
    assert first.poll() is not None
    events = [event for _, event in stream.take_events()]
    assert any("does not answer" in event for event in events)
    segments.close()
    assert stream.account.is_balanced


def test_a_capture_process_that_never_works_is_an_error(camera, monkeypatch):
    monkeypatch.setattr("streamclr.streams.cameras.live.MIN_RETRY_SECONDS", 0.01)
    stream = open_stream(camera().url, size=32)
    monkeypatch.setattr("streamclr.streams.cameras.live.sys.executable", "false")
    with pytest.raises(UserError, match="does not start: see its errors above"):
        next(stream.segments(4))


def test_the_capture_process_ends_with_its_parent(camera, tmp_path):
    source = camera(fps=100)
    program = (
        "import sys; from streamclr import open_stream\n"
        f"stream = open_stream({source.url!r}, size=32)\n"
        "for images in stream.segments(4):\n"
        "    print(stream._captures[0]._process.pid, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{child}").exists(), seconds=60)


def test_jpegs_on_standard_input(tmp_path):
    content = b"".join(jpeg(i) for i in range(40)) + jpeg(40)[:300] + jpeg(41) + jpeg(42)[:-2]
    program = (
        "from streamclr import open_stream\n"
        "stream = open_stream('-?overload=wait', size=32)\n"
        "print(sum(len(images) for images in stream.segments(16)), stream.account)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, check=True)
    assert done.stdout.decode().startswith("41 43 frames = 41 learned from")
    assert b"2 truncated" in done.stdout


def test_a_directory_that_is_being_written_to(tmp_path):
    def write():
        for i in range(40):
            (tmp_path / ".next").write_bytes(jpeg(i) if i != 20 else b"")
            (tmp_path / ".next").rename(tmp_path / f"{i}.jpg")  # whole, should this thread be held up in between
            time.sleep(0.01)

    threading.Thread(target=write).start()
    stream = open_stream(f"watch:{tmp_path}", size=32)
    found = numbers(torch.cat(list(stream.segments(10, until=30))))
    assert found == [i for i in range(31) if i != 20]
    again = open_stream(f"watch:{tmp_path}", size=32)
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert numbers(torch.cat(list(again.segments(9, until=39)))) == list(range(31, 40))
    assert again.account.is_balanced
    assert dict(again.account.rejected) == {"empty": 1}


def test_names_of_files_tell_tracks_apart(tmp_path):
    """All frames look alike, so that no cut is found in their pixels."""
    for i, name in enumerate(["door_1_0", "door_1_1", "door_2_0", "gate_0", "gate_1", "gate_2"]):
        (tmp_path / f"{name}.jpg").write_bytes(jpeg(0))
        os.utime(tmp_path / f"{name}.jpg", ns=(0, i))
    for options, n_tracks in (("", 1), ("?tracks=name", 3)):
        stream = open_stream(f"watch:{tmp_path}{options}", size=32)
        next(stream.segments(6))
        tracks = stream.tracks(torch.arange(6)).tolist()
        assert tracks == ([0] * 6 if n_tracks == 1 else [0, 0, 1, 2, 2, 2])


def test_a_directory_that_goes_away_for_a_while_is_not_taken_again(tmp_path):
    directory = tmp_path / "in"
    directory.mkdir()
    for i in range(4):
        (directory / f"{i}.jpg").write_bytes(jpeg(i))

    def go_away_and_come_back():
        """Called again and again while there is no frame."""
        if len(found) < 4:
            return
        if directory.exists() and not (directory / "9.jpg").exists():
            directory.rename(tmp_path / "away")
        elif (tmp_path / "away").exists() and stream.take_events():  # it was missed
            (tmp_path / "away" / "9.jpg").write_bytes(jpeg(9))
            (tmp_path / "away" / "10.jpg").write_bytes(jpeg(10))
            (tmp_path / "away").rename(directory)

    found, stream = [], open_stream(f"watch:{directory}", size=32)
    segments = stream.segments(2, idle=go_away_and_come_back)
    for _ in range(3):
        found += numbers(next(segments))
    segments.close()
    assert found == [0, 1, 2, 3, 9, 10]
    assert stream.account.received == 6


def test_an_empty_directory_does_not_stop_a_camera(camera, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "all.txt").write_text(f"watch:{tmp_path / 'empty'}\n{camera(fps=200, last=60).url}\n")
    stream = open_stream(tmp_path / "all.txt", size=32)
    assert numbers(torch.cat(list(stream.segments(20, until=60)))) == list(range(60))


def test_frames_that_are_all_rejected_are_in_the_account(tmp_path):
    source = b"".join(jpeg(i)[:-200] for i in range(20))
    program = (
        "from streamclr import open_stream\n"
        "stream = open_stream('-', size=32)\n"
        "print(sum(len(images) for images in stream.segments(16)), stream.account)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=source, capture_output=True, check=True)
    assert b"0 20 frames = 0 learned from + 0 passed over + 20 rejected" in done.stdout


def test_a_recording_without_times_keeps_its_rate(tmp_path):
    from streamclr.streams.cameras.capture import CaptureThread, Raw
    from streamclr.streams.cameras.feed import Feed

    class Timeless(Feed):
        def open(self, mark):
            good = lambda spare: Frame(Image.new("RGB", (8, 8)), (8, 8))  # noqa: E731
            return (Raw(_bad if i == 10 else good, i, i / 10) for i in range(50))

    capture = CaptureThread(Timeless("video", "", 8, drops=False, fps=5.0))
    answer, frames = capture.fetch(100, 5)
    assert len(frames) == 24  # of 25, one of which is damaged
    assert answer["account"]["passed"] == {"fps": 25}


def _bad(spare):
    raise BadFrame("it", "damaged", "a test")


def test_a_stop_while_there_is_no_frame(camera):
    source = camera(fps=50, faults=[(20, "stall")])
    stream = open_stream(source.url, size=32, timeout=30)

    def idle():
        return stream.position == 16 and bool(source.fault_times) and stream._captures[0]._captured == 20

    assert sum(len(images) for images in stream.segments(16, idle=idle)) == 16
    assert not stream.take_events()  # the connection was not yet given up
    assert stream.account.learned == 16
    assert stream.account.is_balanced
    assert stream.account.received == 20


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("/dev/video77", "no camera '/dev/video77'"),
        ("77", "no camera '/dev/video77'"),
        ("watch:nowhere", "no directory 'nowhere'"),
        ("watch:", "needs a directory"),
        ("watch:.?tracks=folder", "tracks is 'folder': use name"),
        ("http://127.0.0.1:1/#tracks=name", "tracks=name is for watch: and folder:"),
        ("video:nowhere.mp4", "no file nowhere.mp4: give a video file"),
        ("http://127.0.0.1:1/#passes=2", "passes=2 is for recordings, http has no end"),
        ("http://127.0.0.1:1/?fps=0", "fps is 0"),
        ("http://127.0.0.1:1/#every=0", "every is 0"),
        ("http://127.0.0.1:1/#timeout=-1", "timeout is -1"),
        ("http://127.0.0.1:1/#retries=-1", "retries is -1"),
        ("http://127.0.0.1:1/#overload=maybe", "overload is 'maybe'"),
        ("http://127.0.0.1:1/#stc=5", "has no option 'stc'"),
        ("rtsp://u:secret@127.0.0.1:1/#size=1", "size is 1"),
        ("list:nowhere.txt", "no file nowhere.txt: a list has a source on each line"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(source, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told) as error:
        open_stream(source)
    assert "secret" not in str(error.value)


def test_the_options_of_a_url():
    own = open_stream("http://127.0.0.1:1/video?fps=30&id=2#every=3", size=32).feeds[0]
    assert (own.where, own.every, own.fps) == ("http://127.0.0.1:1/video?fps=30&id=2", 3, None)
    ours = open_stream("http://127.0.0.1:1/video?fps=30&id=2", size=32).feeds[0]
    assert (ours.where, ours.fps) == ("http://127.0.0.1:1/video?id=2", 30)


def test_the_rate_at_which_frames_come(camera):
    stream = open_stream(camera(fps=200, last=41).url, size=32)  # in a fifth of a second, if nothing holds it up
    assert stream.measured_fps(seconds=8) == 5  # after the first
    assert stream.account.received == 0
    dead = camera()
    dead.hang_up()
    with pytest.raises(UserError, match=r"no frames in 15 s .*refused"):
        open_stream(f"{dead.url}#retries=0", size=32).measured_fps()  # ends as soon as it is refused


def test_retries_end_the_stream(camera):
    source = camera()
    source.hang_up()
    stream = open_stream(f"{source.url}#retries=1", size=32)
    assert list(stream.segments(4)) == []


def test_a_run_on_a_clip_leaves_an_account_and_no_password(tmp_path, camera):
    clip = write_clip(tmp_path / "clip.mp4")
    path, results = run(
        RunOptions(source=f"{clip}?every=2", size=16, buffer=8, width=1, out=str(tmp_path / "run"), checkpoint_steps=1)
    )
    assert results["images"] == 30
    account = Account(received=60, learned=30, passed=Counter(every=30))
    assert Account.of(results["account"]) == account
    source = camera(fps=200)
    url = source.url.replace("//", "//me:secret@")
    path, results = run(RunOptions(source=url, size=16, buffer=8, width=1, images=24, out=str(tmp_path / "camera")))
    assert results["account"]["learned"] == 24
    for file in path.rglob("*"):
        assert not file.is_file() or b"secret" not in file.read_bytes()
    assert RunDirectory(path).config.source == source.url.replace("//", "//me:***@") + "#fit=stretch"


def test_a_stopped_run_on_a_camera_goes_on(camera, tmp_path):
    source = camera(fps=100)
    words = ["run", "--source", f"{source.url}#size=16", "--buffer", "8", "--width", "1", "--policy", "random"]
    command = [sys.executable, "-m", "streamclr", *words, "--out", str(tmp_path / "run")]
    journal, states = tmp_path / "run" / "journal.jsonl", []
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        n_due = 5 + (len(journal.read_text().splitlines()) if states else 0)
        until(lambda n=n_due: journal.exists() and len(journal.read_text().splitlines()) >= n, seconds=120)
        process.terminate()
        assert process.wait(60) == 143
        assert "goes on" in process.stderr.read()
        states.append(Checkpoints(tmp_path / "run" / "checkpoints").latest()[1])
    for state in states:
        account = Account.of(state["stream"]["account"])
        assert account.is_balanced
        assert account.learned == state["stream"]["position"] == 8 * state["learner"]["n_steps"]
    assert states[1]["learner"]["n_steps"] >= states[0]["learner"]["n_steps"] + 5
    assert states[1]["stream"]["account"]["received"] > states[0]["stream"]["account"]["received"]


@pytest.mark.parametrize("clip", ["dog.mp4", "coffee.mp4"])
def test_real_clips(clip):
    path = Path(os.environ.get("STREAMCLR_CLIPS", "../shared/data")) / clip
    if not path.exists():
        pytest.skip(f"{path} is not here")
    stream = open_stream(path, size=48)
    assert isinstance(stream, CameraStream)
    images = torch.cat(list(stream.segments(64)))
    assert stream.account.is_balanced
    assert len(images) == stream.account.learned > 200
    assert images.float().std() > 20
