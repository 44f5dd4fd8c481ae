import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from streamclr import UserError, resnet18
from streamclr.base.files import json_line, write_json
from streamclr.base.tensors import DTYPES, load_checked, load_metadata, load_tensors, load_weights, save_tensors
from streamclr.encoders.projection import ContrastiveModel, load_encoder
from streamclr.records.checkpoints import Checkpoints, Pace


def test_json_has_no_nan_and_no_leftovers(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": [1, float("inf")], 3: (2.5,)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [1, None], "3": [2.5]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json_line({"a": float("-inf")}) == '{"a": null}\n'


def test_tensors_round_trip(tmp_path):
    tensors = {"a": torch.rand(3, 2).T, "b": torch.arange(4)}
    save_tensors(tmp_path / "t.safetensors", tensors)
    read = load_tensors(tmp_path / "t.safetensors")
    assert all(torch.equal(read[key], tensors[key]) for key in tensors)


def test_tensors_are_on_the_disk_before_their_name_is(tmp_path, monkeypatch):
    """After a power cut the file is the old one or the new one: never a name whose content was not written yet."""
    calls, (fsync, replace) = [], (os.fsync, os.replace)

    def record_fsync(file):
        calls.append(f"fsync {'directory' if os.path.isdir(f'/proc/self/fd/{file}') else 'file'}")
        fsync(file)

    def record_replace(old, new):
        calls.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    save_tensors(tmp_path / "t.safetensors", {"a": torch.rand(3)}, about="x")
    assert calls == ["fsync file", "rename", "fsync directory"]
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o777 == 0o644


def test_tensors_of_every_type_are_what_the_library_writes(tmp_path):
    tensors = {str(i): torch.arange(5).to(dtype) for i, dtype in enumerate(DTYPES)} | {"none": torch.zeros(0, 3)}
    save_tensors(tmp_path / "ours", tensors, about="text ✓")
    with safe_open(tmp_path / "ours", "pt") as content:
        assert content.metadata() == {"about": "text ✓"}
        assert {name: content.get_tensor(name).tolist() for name in content.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in tensors.items()
        }
    save_tensors(tmp_path / "bare", {})
    assert load_tensors(tmp_path / "bare") == load_metadata(tmp_path / "bare") == {}


def test_tensors_on_a_full_disk_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UserError, match=r"cannot write .*t\.safetensors \(No space left on device\)"):
        save_tensors(tmp_path / "t.safetensors", {"a": torch.rand(3)})
    assert not list(tmp_path.iterdir())


def test_public_weights_load_with_and_without_their_classifier(tmp_path):
    source, target = resnet18(width=4, stem="imagenet"), resnet18(width=4, stem="imagenet")
    weights = dict(source.state_dict()) | {"fc.weight": torch.zeros(1000, 32), "fc.bias": torch.zeros(1000)}
    save_file(weights, tmp_path / "w.safetensors")
    load_encoder(target, tmp_path / "w.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    old = {key: value for key, value in weights.items() if "num_batches" not in key}
    save_file(old, tmp_path / "old.safetensors")
    load_encoder(resnet18(width=4, stem="imagenet"), tmp_path / "old.safetensors")


def test_a_runs_own_weights_load_as_an_encoder(tmp_path):
    model, target = ContrastiveModel(resnet18(width=4)), resnet18(width=4)
    save_tensors(tmp_path / "model.safetensors", model.state_dict())
    load_encoder(target, tmp_path / "model.safetensors")
    assert torch.equal(target.conv1.weight, model.encoder.conv1.weight)


def test_a_mismatch_is_listed_by_key_and_nothing_is_loaded(tmp_path):
    weights = dict(resnet18(width=4, stem="imagenet").state_dict())
    del weights["bn1.bias"]
    weights["extra"] = torch.zeros(1)
    save_file(weights, tmp_path / "w.safetensors")
    target = resnet18(width=4)
    before = target.bn1.weight.clone()
    with pytest.raises(UserError, match="does not fit") as error:
        load_encoder(target, tmp_path / "w.safetensors")
    for part in ("bn1.bias is missing", "extra is not known", "conv1.weight is [4, 3, 7, 7], not [4, 3, 3, 3]"):
        assert part in str(error.value)
    assert torch.equal(target.bn1.weight, before)


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 64])
def test_files_that_are_no_safetensors(tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"w\.safetensors is not a whole safetensors file"):
        load_tensors(tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="no file"):
        load_tensors(tmp_path / "missing")


def test_checked_tensors_are_those_expected(tmp_path):
    file = tmp_path / "w.safetensors"
    expected = {"a": torch.zeros(2, device="meta"), "n": torch.zeros((), dtype=torch.int64, device="meta")}
    save_file({"a": torch.ones(2), "n": torch.tensor(3)}, file)
    assert load_checked(file, expected)["n"] == 3
    for wrong, told in [
        ({"a": torch.ones(2)}, "n is missing"),
        ({"a": torch.ones(3), "n": torch.tensor(3)}, r"a is \[3\] of F32, not \[2\] of F32"),
        ({"a": torch.ones(2), "n": torch.tensor(3.0)}, r"n is \[\] of F32, not \[\] of I64"),
        ({"a": torch.tensor([1, float("inf")]), "n": torch.tensor(3)}, "a has values that are not finite"),
        ({f"{i}": torch.ones(1) for i in range(9)}, "0 is not known; 1 is not known; 2 is not known; and 8 more"),
    ]:
        save_file(wrong, file)
        with pytest.raises(UserError, match=told):
            load_checked(file, expected)


def test_load_weights_lists_every_key():
    with pytest.raises(UserError) as error:
        load_weights(resnet18(width=4), {}, "nothing")
    assert str(error.value).count("is missing") == 100  # all but the counters of old weights


STATE = {
    "a": {"weights": torch.arange(6.0).view(2, 3).T, "flag": torch.tensor(True), "none": torch.zeros(0, 3)},
    "b": [1, 2.5, None, "text", True, float("nan"), [torch.tensor([7], dtype=torch.uint8)]],
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def test_a_state_round_trips_and_the_last_three_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    for number in (1, 2, 10, 11):
        assert checkpoints.save(number, STATE | {"number": number}) > 0
    assert checkpoints.numbers() == [2, 10, 11]
    number, state = checkpoints.latest()
    assert number == 11
    assert same(STATE | {"number": 11}, state)
    # what is in it, others can read
    assert load_tensors(tmp_path / "c" / "0000000011" / "state.safetensors").keys() == {
        "a/weights",
        "a/flag",
        "a/none",
        "b/6/0",
    }


def test_every_flipped_byte_and_every_cut_is_found(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"x": torch.arange(3), "step": 2})
    n_damages = 0
    for file in (tmp_path / "c" / "0000000002").iterdir():
        whole = file.read_bytes()
        for i in range(len(whole)):
            for damaged in (whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :], whole[:i]):
                file.write_bytes(damaged)
                with pytest.raises((UserError, OSError)):
                    checkpoints.load(2)
                n_damages += 1
        file.write_bytes(whole + b" ")
        with pytest.raises((UserError, OSError)):
            checkpoints.load(2)
        file.unlink()
        assert checkpoints.latest() == (1, {"step": 1})
        assert "going back to the checkpoint before" in capsys.readouterr().err
        file.write_bytes(whole)
    assert checkpoints.latest()[0] == 2
    assert n_damages > 500


CALLS = ("mkdir", "open", "write", "fsync", "close", "rename")


def fail_at(monkeypatch, k, how):
    """The k-th of the calls that a save makes fails; returns the count of calls so far."""
    count = [0]

    def wrapped(name, real):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == k:
                if how == "short" and name == "write":
                    return real(args[0], bytes(args[1])[: len(args[1]) // 2]) if len(args[1]) > 1 else real(*args)
                if how != "short":
                    raise OSError(how, os.strerror(how))
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(f"streamclr.records.checkpoints.os.{name}", wrapped(name, getattr(os, name)))
    return count


@pytest.mark.parametrize("how", [errno.EIO, errno.ENOSPC, "short"])
def test_whichever_call_fails_the_one_before_is_whole(tmp_path, monkeypatch, how):
    with monkeypatch.context() as patch:
        count = fail_at(patch, 0, how)
        Checkpoints(tmp_path / "count").save(1, STATE)
        n_calls = count[0]
    assert n_calls > 10
    for k in range(1, n_calls + 1):
        checkpoints = Checkpoints(tmp_path / f"{k}")
        checkpoints.save(1, STATE | {"number": 1})
        with monkeypatch.context() as patch:
            fail_at(patch, k, how)
            try:
                checkpoints.save(2, STATE | {"number": 2})
                failed = False
            except OSError:
                failed = True
        assert not (failed and how == "short")  # else only calls whose failure does not matter may have gone unnoticed
        number, state = checkpoints.latest()
        # The last calls come after the rename: the new one is there and whole, only not yet certain to stay.
        assert number in ((1, 2) if failed else (2,))
        assert same(state, STATE | {"number": number})
        checkpoints.save(3, STATE | {"number": 3})
        assert checkpoints.latest()[0] == 3
        assert not list((tmp_path / f"{k}").glob(".part*"))
        shutil.rmtree(tmp_path / f"{k}")


def test_the_pace_is_by_steps_and_minutes_and_below_a_gib_an_hour(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("streamclr.records.checkpoints.time.monotonic", lambda: now[0])
    pace = Pace(Checkpoints(tmp_path / "c"), minutes=10, steps=3)
    assert [pace.due() for _ in range(4)] == [False, False, True, True]  # and again, until there is one
    pace.save(3, {})
    now[0] = 599
    assert not pace.due()
    now[0] = 600
    assert pace.due()
    monkeypatch.setattr(Checkpoints, "save", lambda *_: 2**29)
    pace.save(5, {})
    now[0] += 1799
    assert not pace.due()
    now[0] += 1
    assert pace.due()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    pace.save(6, {})
    assert "no checkpoint of step 6 (No space left on device)" in capsys.readouterr().err
    for options in ({"minutes": -1}, {"minutes": float("nan")}, {"minutes": 1, "steps": 0}):
        with pytest.raises(UserError, match="checkpoint_"):
            Pace(Checkpoints(tmp_path), **options)


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(UserError, match="policy/seen"):
        Checkpoints(tmp_path).save(1, {"policy": {"seen": {1, 2}}})
    with pytest.raises(UserError, match="keys of a state are text"):
        Checkpoints(tmp_path).save(1, {"policy": {1: 2}})
    assert not list(tmp_path.iterdir())
