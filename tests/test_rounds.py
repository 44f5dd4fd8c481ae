import json
import math

import pytest
import torch

from streamclr import UserError
from streamclr.base.tensors import load_tensors
from streamclr.fleet.average import Update
from streamclr.fleet.device import GLOBAL
from streamclr.fleet.rounds import Rounds, read_rounds, summary
from streamclr.models.pretrained import from_pretrained
from streamclr.records.options import RunOptions

CONFIG = RunOptions(width=1, stem="small", size=8)
OPTIONS = {"momentum": 0.0, "slow": 0.0, "statistics": "shared", "round_images": 16}


def opened(path, **options):
    return Rounds(path / "fleet", CONFIG, OPTIONS | options)


def moved(rounds, device, by=0.01):
    return Update(device, {name: tensor + by for name, tensor in rounds.average.weights.items()}, 16, loss=2.0)


def test_a_round_is_on_the_disk_when_it_is_over(tmp_path, capsys):
    rounds = opened(tmp_path)
    bad = Update("3", {name: tensor * math.nan for name, tensor in rounds.average.weights.items()}, 16)
    rounds.take([moved(rounds, "1"), moved(rounds, "2"), bad], 5, {"4": "no camera"}, 1.5)
    (line,) = read_rounds(tmp_path / "fleet")
    told = "round 1 | 2 of 5 devices | loss 2.000 | 1 rejected: not finite | 1 failed | 1 did not answer"
    assert capsys.readouterr().err.splitlines()[-1] == told == summary(line)
    assert (line["taken"], line["refused"], line["failed"]) == (["1", "2"], {"3": "not finite"}, {"4": "no camera"})
    assert (line["silent"], line["refused_so_far"]) == (1, {"not finite": 1})
    saved = load_tensors(tmp_path / "fleet" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in rounds.average.kept.items())


def test_started_again_it_goes_on_after_the_last_round(tmp_path):
    rounds = opened(tmp_path, momentum=0.5)
    rounds.take([moved(rounds, "1")], 1, {}, 1.0)
    with (tmp_path / "fleet" / "rounds.jsonl").open("a") as file:
        file.write('{"of": "a round that was not saved"}\n')
    rounds.close()
    again = opened(tmp_path, momentum=0.5)
    assert again.n_rounds == 1
    assert len(read_rounds(tmp_path / "fleet")) == 1
    assert all(torch.equal(again.average.weights[name], t) for name, t in rounds.average.weights.items())
    again.take([moved(again, "1")], 1, {}, 1.0)
    assert [line["number"] for line in read_rounds(tmp_path / "fleet")] == [1, 2]


def test_a_directory_is_for_one_fleet_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("streamclr.fleet.rounds.LOCK_SECONDS", 0.2)
    first = opened(tmp_path)
    with pytest.raises(UserError, match="another fleet is running in"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_a_server_without_statistics_has_no_classifier_for_use(tmp_path):
    rounds = opened(tmp_path, statistics="local")
    n = rounds.model.n_features
    assert rounds.take_labels([("1", torch.zeros(1, n), ["cat"]), ("2", torch.ones(1, n), ["dog"])]) is not None
    assert not (tmp_path / "fleet" / GLOBAL).exists()


def test_other_options_in_the_same_directory_are_told(tmp_path):
    opened(tmp_path)
    with pytest.raises(UserError, match=r"other options \(slow is 0.0 there and 0.9 here\)"):
        opened(tmp_path, slow=0.9)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(UserError, match="is not empty and has no fleet in it"):
        Rounds(tmp_path / "other", CONFIG, OPTIONS)
    with pytest.raises(UserError, match="'mine'"):
        opened(tmp_path, statistics="mine")


def test_one_classifier_from_the_labels_of_all(tmp_path):
    rounds = opened(tmp_path)
    n = rounds.model.n_features
    left, right = torch.zeros(4, n), torch.ones(4, n)
    head = rounds.take_labels([("1", left, ["cat"] * 4), ("2", right, ["dog"] * 4)])
    assert (head.classes, head.n_labels) == (["cat", "dog"], 8)
    assert head.classifier()(torch.stack([left[0], right[0]])).argmax(1).tolist() == [0, 1]
    assert from_pretrained(tmp_path / "fleet" / GLOBAL).classes == ["cat", "dog"]
    rounds.close()
    assert opened(tmp_path).head.classes == ["cat", "dog"]


def test_labels_that_are_no_labels_are_refused(tmp_path):
    rounds = opened(tmp_path)
    n = rounds.model.n_features
    bad = [
        ("1", torch.full((1, n), math.nan), ["cat"]),
        ("2", torch.zeros(2, n), ["cat"]),
        ("3", torch.zeros(1, n + 1), ["cat"]),
        ("4", torch.zeros(1, n), ["c" * 1000]),
        ("5", torch.zeros(2000, n), ["cat"] * 2000),
        ("6", torch.zeros(1, n).to(torch.float8_e4m3fn), ["cat"]),
    ]
    assert rounds.take_labels([*bad, ("7", torch.zeros(1, n), ["cat"])]) is None
    assert rounds.refused["labels"] == len(bad)
    assert rounds.head is None


def test_a_full_disk_costs_a_checkpoint_and_not_the_fleet(tmp_path, monkeypatch, capsys):
    rounds = opened(tmp_path)
    monkeypatch.setattr(rounds.checkpoints, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    rounds.take([moved(rounds, "1")], 1, {}, 1.0)
    assert "no checkpoint of round 1 (no space left)" in capsys.readouterr().err
    assert json.loads((tmp_path / "fleet" / "rounds.jsonl").read_text())["number"] == 1
