import json
from contextlib import closing

import pytest
import torch

from streamclr import UserError
from streamclr.classifier import Head
from streamclr.fleet.average import exchanged, is_statistic
from streamclr.fleet.device import GLOBAL, Device, LabelledImages
from streamclr.fleet.rounds import Rounds
from streamclr.models.pretrained import from_pretrained
from streamclr.recipe import PAPER
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import resolve_architecture
from support.images import random_images


@pytest.fixture
def config(tmp_path):
    return RunOptions(source="synthetic:?size=8", buffer=8, width=2, lr=1e-4, out=str(tmp_path / "device"))


@pytest.fixture
def weights(config):
    torch.manual_seed(1)
    return exchanged(resolve_architecture(config, 8).make_model())


def learn(config, weights, n=32, **options):
    with closing(Device(config, **options)) as device:
        return device.learn(weights, n, "7")


def test_a_round_learns_as_many_images_as_asked_and_the_next_goes_on_where_it_was(config, weights, tmp_path):
    first = learn(config, weights)
    second = learn(config, first.weights, 16)
    assert (first.device, first.n_images, second.n_images) == ("7", 32, 16)
    assert first.weights.keys() == weights.keys()
    assert any(not torch.equal(first.weights[name], weights[name]) for name in weights)
    directory = RunDirectory(tmp_path / "device")
    assert [step["seen"] for step in directory.steps()] == [8, 16, 24, 32, 40, 48]
    _, state = directory.checkpoints.latest()
    assert state["learner"]["buffer"]["n_seen"] == 48
    assert second.loss == pytest.approx(sum(step["loss"] for step in directory.steps()[-2:]) / 2)


def test_the_encoder_is_the_servers_and_the_rest_its_own(config, weights, tmp_path):
    learn(config, weights, 16)
    checkpoints = RunDirectory(tmp_path / "device").checkpoints
    moments = checkpoints.latest()[1]["learner"]["optimizer"]["means"]
    assert any(bool(moment.any()) for moment in moments)
    again = learn(config, weights, 8)  # the server goes back to where it was; the device's moments do not
    step = {name: (again.weights[name] - weights[name]).abs().max() for name in weights if not is_statistic(name)}
    assert 0 < max(step.values()) <= 10 * PAPER.lr  # one step of Adam from the server's weights, not from its own


def test_two_rounds_are_one_run_where_the_server_returns_what_it_got(config, weights, tmp_path):
    halves = learn(config, learn(config, weights, 16).weights, 16)
    whole = RunOptions(**{**vars(config), "out": str(tmp_path / "whole")})
    assert all(torch.equal(halves.weights[name], tensor) for name, tensor in learn(whole, weights, 32).weights.items())


def test_local_statistics_stay(config, weights):
    sent = {name: tensor for name, tensor in weights.items() if not is_statistic(name)}
    update = learn(config, sent, statistics="local")
    assert update.weights.keys() == sent.keys()
    with closing(Device(config, statistics="local")) as device:
        model = device.model_with(sent)
        own = device.directory.checkpoints.latest()[1]["learner"]["model"]
    assert torch.equal(model.encoder.bn1.running_mean, own["encoder.bn1.running_mean"])
    assert torch.equal(model.encoder.conv1.weight, sent["encoder.conv1.weight"])


def test_local_statistics_begin_as_the_fleets_and_are_then_the_devices(tmp_path):
    """The frozen stages of a public encoder work with those that it came with."""
    config = RunOptions(
        source="synthetic:?size=32", encoder="mobilenet_v2", buffer=8, batch=8, segment=8, init="random", size=32,
        train="1", positives="views", out=str(tmp_path / "device"),
    )  # fmt: skip
    options = {"momentum": 0.0, "slow": 0.0, "statistics": "local", "round_images": 8}
    with closing(Rounds(tmp_path / "fleet", config, options)) as rounds:
        with torch.no_grad():
            rounds.start["encoder.features.0.1.running_mean"].fill_(0.5)
        update = learn(config, rounds.sent, 8, statistics="local")
        assert not any(map(is_statistic, update.weights))
        rounds.take([update], 1, {}, 1.0)
        first = RunDirectory(tmp_path / "device").checkpoints.latest()[1]["learner"]["model"]
        learn(config, rounds.sent, 8, statistics="local")
    second = RunDirectory(tmp_path / "device").checkpoints.latest()[1]["learner"]["model"]
    frozen, learning = "encoder.features.0.1.running_mean", "encoder.features.18.1.running_mean"
    assert (first[frozen] == 0.5).all()
    assert torch.equal(second[frozen], first[frozen])
    assert not torch.equal(second[learning], rounds.start[learning])
    steps = second["encoder.features.18.1.num_batches_tracked"], second["head.1.num_batches_tracked"]
    assert steps == (2, 2)  # of both rounds: the second did not begin anew


@pytest.mark.parametrize("n_rounds", [0, 1])  # done before, so that the second has a checkpoint to spoil
def test_weights_that_do_not_fit_are_told_and_change_nothing(config, weights, n_rounds):
    for _ in range(n_rounds):
        learn(config, weights)
    with pytest.raises(UserError, match="what the server sent does not fit"):
        learn(config, weights | {"encoder.conv1.weight": torch.zeros(3, 3, 3, 3)})
    with pytest.raises(UserError, match="other is not known"):
        learn(config, weights | {"other": torch.zeros(1)})
    assert learn(config, weights, 16).n_images == 16


def test_features_are_sent_and_no_images(config, weights):
    labelled = LabelledImages(random_images(5, 8), ["cat", "dog", "cat", "dog", "dog"])
    with closing(Device(config, labelled=lambda: labelled)) as device:
        features, names = device.features(weights)
        assert features.shape == (5, device.model_with(weights).n_features)
    assert names == labelled.names


def test_without_answers_there_are_no_features(config, weights):
    with closing(Device(config)) as device:
        features, names = device.features(weights)
    assert (len(features), names) == (0, [])


def test_the_answers_of_a_person_are_its_labels(config, weights, tmp_path):
    from streamclr.labelling.session import LabelSession

    config = RunOptions(**{**vars(config), "label_budget": "6"})
    learn(config, weights, 32)
    with closing(LabelSession(RunDirectory(tmp_path / "device"))) as session:
        session.prepare()
        for number, question in enumerate(session.questions[:4]):
            name = ("cat", "dog")[number % 2]
            known = {n: i for i, n in session.labels.classes().items()}
            class_id = known[name] if name in known else session.labels.add_class(name)
            session.labels.answer(f"request {number}", "label", [question.key], class_id)
    with closing(Device(config)) as device:
        features, names = device.features(weights)
    assert features.shape[0] == 4
    assert sorted(names) == ["cat", "cat", "dog", "dog"]


def test_the_fleets_classifier_is_there_to_predict_with(config, weights, tmp_path):
    with closing(Device(config)) as device:
        n_features = device.model_with(weights).n_features
        for _ in range(2):  # the second takes the place of the first
            device.take_head(weights, Head(n_features, 2).state_dict(), ["cat", "dog"])
    found = from_pretrained(tmp_path / "device" / GLOBAL)
    assert found.classes == ["cat", "dog"]
    assert torch.equal(found.encoder.conv1.weight, weights["encoder.conv1.weight"])
    assert json.loads((tmp_path / "device" / "config.json").read_text())["images"] is None
