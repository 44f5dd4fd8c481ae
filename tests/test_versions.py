import threading
from contextlib import suppress

import pytest
import torch

from streamclr.base.errors import UserError
from streamclr.models.versions import BACK, N_VERSIONS, Versions
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from support.labelling import make_run, make_version


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(make_run(tmp_path / "run"))


def images(n=4):
    return torch.randint(256, (n, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def taken(served, n):
    for seed in range(n):
        served.take(make_version(served.directory, seed), served.current)
    return served


def test_what_is_taken_is_what_another_process_finds(directory):
    version = make_version(directory)
    ours = Versions(directory).take(version, None)
    theirs = Versions(directory).look()
    assert (ours.number, theirs.number) == (1, 1)
    assert torch.equal(theirs.probabilities(images()), version.probabilities(images()))
    assert (theirs.classes, theirs.step, theirs.score) == (version.classes, version.step, version.score)
    assert (theirs.trained_on, theirs.held_back) == (version.trained_on, version.held_back)
    assert theirs.by_class == version.by_class == {"red": (4, 5)}
    assert theirs.about() == {"version": 1, "step": 7, "labels": 2, "held_back": 5, "accuracy": 0.8}
    assert not any(p.requires_grad for p in theirs.classifier.model.parameters())
    assert not theirs.classifier.model.training


def test_there_is_nothing_before_the_first(directory):
    assert Versions(directory).look() is None
    assert not (directory.path / "served").exists()


def test_the_last_few_are_kept(directory):
    served = taken(Versions(directory), N_VERSIONS + 3)
    names = sorted(path.name for path in (directory.path / "served").iterdir())
    assert names == [f"{n:010}" for n in range(4, N_VERSIONS + 4)]
    for number in range(N_VERSIONS + 2, 3, -1):
        assert Versions(directory).rollback()[0].number == Versions(directory).look().number == number
    with pytest.raises(UserError, match=r"version 4 is the first of .*: there is none before it"):
        served.rollback()


def test_a_rollback_of_another_process_is_seen_and_its_number_never_used_again(directory):
    told = []
    running = taken(Versions(directory, told.append), 3)
    now, was = Versions(directory).rollback()
    assert (now.number, was.number) == (2, 3)
    assert running.current.number == 3  # not yet looked
    assert running.look().number == 2
    assert told == [f"rolled back: {now} is served instead of version 3"]
    assert unpinned(running).take(make_version(directory, 9), running.current).number == 4
    assert Versions(directory).rollback()[0].number == 2  # not 3, which was refused by a person
    assert [path.name for path in (directory.path / "served").glob(f"*{BACK}")] == [f"{4:010}{BACK}"]
    assert running.look().number == 2
    assert unpinned(running).take(make_version(directory, 9), running.current).number == 5


def unpinned(running):
    """Unpinned by another process, as `running` sees it."""
    Versions(running.directory).unpin()
    running.look()
    return running


def test_what_is_pinned_is_served_and_stays(directory):
    told = []
    running = taken(Versions(directory, told.append), 3)
    now, _ = Versions(directory).rollback()
    assert running.look().number == running.pinned == now.number == 2
    assert running.take(make_version(directory, 9), running.current) is None
    assert Versions(directory).look().number == 2
    assert Versions(directory).rollback()[0].number == 1  # a pin does not hold a person back
    assert running.look().number == running.pinned == 1
    assert Versions(directory).unpin().number == 1
    del told[:]
    assert running.look().number == 1
    assert running.pinned is None
    assert told == ["version 1 is unpinned: a better one may take its place"]
    assert running.take(make_version(directory, 9), running.current).number == 4
    with pytest.raises(UserError, match="has no pinned version: streamclr rollback pins"):
        Versions(directory).unpin()


def test_a_rollback_that_was_killed_before_it_put_the_newer_ones_aside_holds(directory, monkeypatch):
    taken(Versions(directory), 3)
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "_put_aside", lambda *_: None)
        Versions(directory).rollback()
    assert sorted(path.name for path in (directory.path / "served").glob("0*")) == [f"{n:010}" for n in (1, 2, 3)]
    assert Versions(directory).look().number == 2
    assert [int(path.name) for path, _ in Versions(directory).facts()] == [2, 1]
    assert Versions(directory).unpin().number == 2
    assert Versions(directory).look().number == 2  # still not 3
    assert Versions(directory).take(make_version(directory), None) is None
    running = Versions(directory)
    running.look()
    assert running.take(make_version(directory), running.current).number == 4


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "x"}', '{"version": null}'])
def test_a_pin_that_somebody_damaged_pins_nothing(directory, content):
    taken(Versions(directory), 2)
    (directory.path / "served" / "pinned.json").write_text(content)
    assert Versions(directory).look().number == 2
    assert Versions(directory).unpin().number == 2
    assert not (directory.path / "served" / "pinned.json").exists()


def test_a_version_of_before_has_no_accuracy_by_class(directory):
    version = make_version(directory)
    state = {name: value for name, value in version.state_dict().items() if name != "by_class"}
    (directory.path / "served").mkdir()
    Checkpoints(directory.path / "served").save(1, state)
    assert Versions(directory).look().by_class == {}


def test_a_rollback_past_a_damaged_version_keeps_the_good_one_and_no_number_is_used_again(directory):
    running = taken(Versions(directory), 3)
    lose(directory.path / "served" / f"{3:010}" / "manifest.json")
    assert Versions(directory).rollback()[0].number == 1
    assert {path.name for path in (directory.path / "served").glob(f"*{BACK}")} == {f"{n:010}{BACK}" for n in (2, 3)}
    assert running.look().number == 1
    unpinned(running)
    for number in (4, 5):
        assert running.take(make_version(directory), running.current).number == number
    for number in (4, 1):
        assert Versions(directory).rollback()[0].number == number
    assert unpinned(running).take(make_version(directory), running.current).number == 6


def test_nothing_to_roll_back_is_one_line(directory):
    with pytest.raises(UserError, match="serves no version: run with --predict"):
        Versions(directory).rollback()
    assert not (directory.path / "served").exists()


def test_a_version_is_not_taken_instead_of_one_that_is_no_longer_served(directory):
    running = taken(Versions(directory), 2)
    rival = running.current
    Versions(directory).rollback()
    assert running.take(make_version(directory), rival) is None
    assert running.current.number == 1
    assert unpinned(running).take(make_version(directory), running.current).number == 3


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(path):
    path.unlink()


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, lose])
def test_a_damaged_version_is_passed_over_and_told(directory, file, damage):
    taken(Versions(directory), 3)
    damage(directory.path / "served" / f"{3:010}" / file)
    told = []
    served = Versions(directory, told.append)
    assert served.look().number == 2
    assert len(told) == 1
    assert "skipping version 3 for the one before" in told[0]
    served.look()
    assert len(told) == 1  # once
    now, was = served.rollback()
    assert (now.number, was.number) == (1, 2)
    assert Versions(directory).look().number == 1
    assert Versions(directory).take(make_version(directory), None) is None
    assert taken(Versions(directory), 0).look().number == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("head"),
        lambda state: state["classes"].append("one too many"),
        lambda state: state["model"].pop("encoder.conv1.weight"),
        lambda state: state.update(score=[1]),
        lambda state: state.update(trained_on=None),
        lambda state: state.update(by_class={"a": [1]}),
    ],
)
def test_what_is_whole_but_no_version_is_passed_over_too(directory, change):
    version = make_version(directory)
    Versions(directory).take(version, None)
    state = version.state_dict() | {"model": dict(version.classifier.model.state_dict())}
    change(state)
    Checkpoints(directory.path / "served").save(2, state)
    told = []
    assert Versions(directory, told.append).look().number == 1
    assert len(told) == 1


def test_all_damaged_is_nothing_served(directory):
    taken(Versions(directory), 2)
    for number in (1, 2):
        flip(directory.path / "served" / f"{number:010}" / "state.safetensors")
    assert Versions(directory).look() is None
    with pytest.raises(UserError, match=r"all versions in .* are damaged"):
        Versions(directory).rollback()


def test_who_looks_does_not_wait_for_a_version_that_is_being_saved(directory, monkeypatch):
    served, in_save, go_on, real = taken(Versions(directory), 1), threading.Event(), threading.Event(), Checkpoints.save

    def save(self, number, state):
        in_save.set()
        assert go_on.wait(20)
        return real(self, number, state)

    monkeypatch.setattr(Checkpoints, "save", save)
    taker = threading.Thread(target=served.take, args=(make_version(directory, 1), served.current))
    taker.start()
    assert in_save.wait(20)
    assert served.look().number == 1  # would hang
    go_on.set()
    taker.join(20)
    assert served.look().number == 2


def test_taking_and_rolling_back_at_the_same_time_leaves_whole_versions(directory):
    running, told = taken(Versions(directory), 2), []
    ends = threading.Event()

    def roll_back():
        while not ends.is_set():
            with suppress(UserError):
                Versions(directory, told.append).rollback()
                Versions(directory, told.append).unpin()

    other = threading.Thread(target=roll_back)
    other.start()
    numbers = []
    for seed in range(30):
        new = running.take(make_version(directory, seed), running.current)
        numbers += [new.number] if new else []
    ends.set()
    other.join(20)
    assert numbers == sorted(set(numbers))
    assert numbers
    assert Versions(directory, told.append).look() is not None
    assert not told  # nothing was found half done
