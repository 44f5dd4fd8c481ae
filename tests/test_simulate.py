"""Flower's own parts, where it is installed: the simulation engine, and what goes over the wire."""

import json
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from streamclr import UserError
from streamclr.fleet.average import exchanged
from streamclr.fleet.device import GLOBAL, Device, LabelledImages
from streamclr.fleet.options import SHARED, RoundsOptions, ServerOptions, SimulateOptions, learner_options
from streamclr.fleet.rounds import Rounds, read_rounds
from streamclr.fleet.simulate import drops_out, prepared, run_rounds, simulate, simulated
from streamclr.fleet.split import whole_of
from streamclr.models.pretrained import from_pretrained
from streamclr.records.options import RunOptions
from streamclr.runs.assemble import initial_model


@pytest.fixture
def source(tmp_path):
    """Four classes of coloured noise."""
    rng = np.random.default_rng(0)
    for part, n in (("train", 20), ("val", 5)):
        for label in range(4):
            (folder := tmp_path / "data" / part / f"class{label}").mkdir(parents=True)
            for number in range(n):
                pixels = rng.integers(0, 120, (8, 8, 3)) + np.array([label % 2, label // 2, 1]) * 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    return f"folder:{tmp_path / 'data'}"


@pytest.fixture
def flower():
    """A message says from which task it comes; in the field Flower tells its processes."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):
        setattr(TaskIdentity, name, 1)


def asked(source, out, **options):
    small = {"devices": 4, "rounds": 2, "round_images": 16, "buffer": 8, "width": 1, "stem": "small", "workers": 1}
    small["patience"] = 1000  # whoever is slow for a while on a busy machine is not silent
    return SimulateOptions(**{"source": source, "out": str(out), "stc": 5} | small | options)


@pytest.mark.system
def test_the_engine_runs_a_fleet_and_goes_on_with_it(source, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a cluster that is not meant
    first = asked(source, tmp_path / "out", labels="25%", head_every=1, dropout=0.3, seed=1)
    path, results = simulate(first)
    dropped = sum(drops_out(first, number, device) for number in (1, 2) for device in range(4))
    assert (results["answers"], results["failed"], results["silent"]) == (8 - dropped, dropped, 0)
    assert 0 < dropped < 8
    assert results["images"] == 16 * results["answers"]
    assert results["refused"] == {}
    assert results["n_labels"] == 4 * 5
    pretrained, test = from_pretrained(path / GLOBAL), whole_of(source).test
    assert pretrained.classes == [f"class{label}" for label in range(4)]
    guessed = pretrained(test.images(np.arange(len(test))))[0].argmax(1).numpy()
    assert results["classifier"] == pytest.approx((guessed == test.labels).mean())
    for device in range(4):  # those that dropped out of the last round, too
        own = from_pretrained(path / "devices" / f"{device:04}" / GLOBAL)
        assert np.array_equal(own(test.images(np.arange(len(test))))[0].argmax(1).numpy(), guessed)
    path, results = simulate(asked(source, path, labels="25%", head_every=1, dropout=0.3, seed=1, rounds=3))
    assert [line["number"] for line in read_rounds(path)] == [1, 2, 3]


@pytest.mark.system
def test_a_fleet_of_mobilenets(source, tmp_path):
    """With a head that has BatchNorm; its first stages do not learn, and are the same afterwards."""
    pytest.importorskip("ray")
    model = {"encoder": "mobilenet_v2", "width": None, "stem": None, "init": "random", "size": 32, "train": "3"}
    config = asked(source, tmp_path / "out", devices=2, round_images=8, labels="25%", head_every=2, **model)
    before = initial_model(prepared(config)[0], 32).state_dict()
    path, results = simulate(config)
    assert (results["rounds"], results["answers"], results["failed"], results["refused"]) == (2, 4, 0, {})
    pretrained = from_pretrained(path / GLOBAL)
    assert pretrained.architecture == ("mobilenet_v2", None, None, None, "batchnorm")
    after = pretrained.model.state_dict()
    moved = {name for name, t in after.items() if t.is_floating_point() and not torch.equal(t, before[name])}
    assert {"encoder.features.18.1.running_var", "head.1.weight", "head.1.running_mean"} <= moved
    assert not any(name.startswith(("encoder.features.0.", "encoder.features.3.")) for name in moved)


def test_every_option_of_the_model_reaches_the_devices_as_it_was(tmp_path, flower):
    """Flower has no None."""
    from flwr.app import ConfigRecord

    from streamclr.fleet.strategy import Fleet

    config = ServerOptions(encoder="mobilenet_v2", init="random", size=32, lr=0.5, flip="on", out=str(tmp_path))
    with closing(Rounds(tmp_path, config.learner, config.of_the_rounds)) as rounds:
        told = ConfigRecord(dict(Fleet(rounds, config).shared))
    options = learner_options(dict(told), {"source": "synthetic:?size=8"})
    assert {name: getattr(options, name) for name in SHARED} == {name: getattr(config, name) for name in SHARED}
    assert (options.width, options.projection, options.train, options.lr) == (None, None, None, 0.5)


def test_a_device_with_fewer_images_than_a_batch_learns(source, tmp_path):
    config = asked(source, tmp_path, buffer=32, round_images=64)  # of 20 images each
    learner, _ = prepared(config)
    with closing(
        simulated(config, learner, tmp_path / "devices", SimpleNamespace(node_config={"partition-id": 1}), {})
    ) as device:
        assert device.learn(exchanged(device.model_with({})), 64, "1").n_images == 64


def test_the_size_of_the_images_is_as_asked(source, tmp_path):
    learner, _ = prepared(asked(source, tmp_path / "out", size=16))
    assert learner.size == 16


def test_a_fleet_in_which_no_device_can_learn_says_why(source, tmp_path, monkeypatch):
    learner, out = prepared(config := asked(source, tmp_path / "out"))

    def fail(config, learner, rounds):
        for _ in range(config.rounds):
            rounds.take([], 4, {"7": "no camera"}, 0.1)

    monkeypatch.setattr("streamclr.fleet.simulate._run", fail)
    monkeypatch.setattr("streamclr.fleet.simulate.need_flower", lambda simulation: None)
    with pytest.raises(UserError, match=r"no device has learned anything in 2 rounds \(no camera\)"):
        run_rounds(config, learner, out)


def test_what_a_device_sends_are_weights_and_features_and_nothing_else(tmp_path, flower):
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from streamclr.fleet.apps import client_app
    from streamclr.fleet.strategy import as_record, as_weights

    config = RunOptions(
        source="synthetic:?size=8", buffer=8, width=1, stem="small", size=8, out=str(tmp_path / "device")
    )
    options = {"momentum": 0.0, "slow": 0.0, "statistics": "shared", "round_images": 16}
    rounds = Rounds(tmp_path / "server", config, options)
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    labelled = LabelledImages(images, ["cat", "dog", "cat"])
    app = client_app(lambda context, told: Device(config, labelled=lambda: labelled))
    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})

    def ask(kind, weights):
        told = ConfigRecord({"round": 1, "images": 16, "statistics": "shared"})
        content = RecordDict({"arrays": as_record(weights), "config": told})
        return app(Message(content, dst_node_id=7, message_type=kind), context)

    learned = ask("train", rounds.average.weights)
    assert set(learned.content) == {"arrays", "metrics"}
    assert len(get_all_nested_objects(learned)) < 10  # each is several calls to the server
    assert as_weights(learned.content["arrays"]).keys() == rounds.average.weights.keys()
    assert dict(learned.content["metrics"]) == {"num-examples": 16, "loss": learned.content["metrics"]["loss"]}
    known = ask("evaluate", rounds.average.weights)
    assert set(known.content) == {"features", "classes", "metrics"}
    assert as_weights(known.content["features"])["features"].shape == (3, rounds.model.n_features)
    wrong = ask("train", {"other": torch.zeros(1)})
    assert wrong.has_error()
    assert "does not fit the model" in wrong.error.reason
    assert "\n" not in wrong.error.reason


class Slow:
    """A grid of which some devices never answer."""

    def __init__(self, replies):
        self.replies = replies

    def push_messages(self, messages):
        return [f"message {i}" for i, _ in enumerate(messages)]

    def pull_messages(self, ids):
        return [self.replies.pop()] if self.replies else []


def test_a_round_does_not_wait_for_the_slowest(monkeypatch, flower):
    from flwr.app import Message, RecordDict

    from streamclr.fleet import strategy

    def reply(number):
        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        message.metadata.__dict__["_reply_to_message_id"] = f"message {number}"
        return message

    clock = [0.0]
    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: clock.__setitem__(0, clock[0] + 10))
    monkeypatch.setattr(strategy, "time", time)  # Ray's threads have the real one
    for n_replies, waited in ((3, 20), (2, 30), (1, 600), (0, 600)):
        clock[0] = 0.0
        grid = Slow([reply(number) for number in range(n_replies)])
        got = strategy.replies_of(grid, [None] * 3, timeout=600, patience=3)
        assert (len(got), clock[0]) == (n_replies, waited)


def test_answers_that_are_no_updates_fail_and_the_others_count(tmp_path, flower, capsys):
    from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

    from streamclr.fleet.strategy import ARRAY, Fleet, as_record

    config = RunOptions(width=1, stem="small", size=8)
    options = RoundsOptions(round_images=16)
    rounds = Rounds(tmp_path / "server", config, options.of_the_rounds)
    fleet = Fleet(rounds, options)
    metrics = MetricRecord({"num-examples": 16, "loss": 2.0})
    other = ArrayRecord({"encoder.conv1.weight": torch.zeros(1)})
    good = as_record({name: tensor + 0.01 for name, tensor in rounds.average.weights.items()})
    half = good[ARRAY].data[: len(good[ARRAY].data) // 2]
    garbage = ArrayRecord({ARRAY: Array("uint8", (len(half),), "safetensors", half)})

    def reply(device, content):
        message = Message(RecordDict(), dst_node_id=device, message_type="train")
        answer = Message(content, reply_to=message)
        answer.metadata.__dict__["_src_node_id"] = device
        return answer

    replies = [
        reply(1, RecordDict({"arrays": good, "metrics": metrics})),
        reply(2, RecordDict({"arrays": garbage, "metrics": metrics})),
        reply(3, RecordDict({"arrays": good})),
        reply(4, Error(0, "no camera\nand more")),
        reply(5, RecordDict({"arrays": other, "metrics": metrics})),
        reply(6, RecordDict({"arrays": MetricRecord({ARRAY: 1}), "metrics": metrics})),
    ]
    fleet.take_updates(replies, len(replies), 1.0)
    (line,) = read_rounds(tmp_path / "server")
    assert line["taken"] == ["1"]
    assert set(line["failed"]) == {"2", "3", "4", "5", "6"}
    assert line["failed"]["4"] == "no camera"
    told = [reply(4, Error(0, "no disk")), reply(6, RecordDict({"features": MetricRecord({ARRAY: 1})}))]
    fleet.take_labels(told)
    assert "device 4 sent no labels: no disk" in capsys.readouterr().err
    assert rounds.refused["labels"] == 1


def test_every_device_has_the_classifier_once(tmp_path, flower):
    from flwr.app import Message, MetricRecord, RecordDict

    from streamclr.fleet.strategy import Fleet, as_record, as_weights

    class Grid:
        def get_node_ids(self):
            return [1, 2, 3]

    options = RoundsOptions(round_images=16)
    rounds = Rounds(tmp_path / "server", RunOptions(width=1, stem="small", size=8), options.of_the_rounds)
    fleet = Fleet(rounds, options)

    def asked_with_head():
        messages = fleet.train_messages(Grid())
        with_head = [message for message in messages if "head" in message.content]
        for message in with_head:
            sent = as_weights(message.content["encoder"])
            assert all(torch.equal(sent[name], tensor) for name, tensor in before.items())
        return {message.metadata.dst_node_id for message in with_head}

    before = dict(rounds.average.kept)
    assert asked_with_head() == set()
    n = rounds.model.n_features
    rounds.take_labels([("1", torch.zeros(1, n), ["cat"]), ("2", torch.ones(1, n), ["dog"])])
    assert asked_with_head() == {1, 2, 3}
    content = {"arrays": as_record({name: tensor + 0.01 for name, tensor in rounds.average.weights.items()})}
    content["metrics"] = MetricRecord({"num-examples": 16, "loss": 2.0})
    answer = Message(RecordDict(content), reply_to=Message(RecordDict(), dst_node_id=2, message_type="train"))
    answer.metadata.__dict__["_src_node_id"] = 2
    fleet.take_updates([answer], 3, 1.0)  # the encoder of the fleet moves on
    assert asked_with_head() == {1, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"min_devices": 9}, "there are 4 devices"),
        ({"split": "even"}, "no split 'even'"),
        ({"source": "synthetic:"}, "cannot be dealt out"),
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"patience": 0.5}, "patience is 0.5"),
        ({"workers": 0}, "workers is 0"),
        ({"labels": "0.01"}, "0.01"),
    ],
)
def test_wrong_options_are_told_before_anything_is_written(source, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        prepared(asked(change.pop("source", source), tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()


@pytest.mark.system
def test_without_flower_a_fleet_says_what_to_install_and_the_core_knows_nothing_of_it():
    code = """
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("flwr", "ray") else find(name, *rest)
import streamclr, streamclr.cli.commands, streamclr.cli.fleet
from streamclr.cli.entry import main
code = main(["fleet", "keys", "nowhere"])
print(json.dumps([code, [name for name in ("flwr", "ray") if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2, []]
    assert "pip install -c constraints.txt -e '.[fleet]'" in done.stderr
