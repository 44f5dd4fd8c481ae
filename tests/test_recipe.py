"""What the recipes decide, and what is decided by hand instead."""

import copy
import dataclasses
import json

import pytest
import torch

from streamclr import Learner, UserError, resnet18
from streamclr.compute.adam import Adam
from streamclr.compute.muon import Muon
from streamclr.encoders.compact import Compact
from streamclr.experiments.beyond import recipe as experiment
from streamclr.experiments.beyond.recipe import learn_for
from streamclr.policy import ContrastScoring, Reservoir
from streamclr.recipe import ADAPT, PAPER, SCRATCH, find_recipe
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan, open_run_stream, resolve
from streamclr.runs.assemble import make_learner
from streamclr.sweeps.lab import Lab, LabOptions
from support.images import make_folder, random_images


def plan_of(**options):
    config = RunOptions(**{"source": "synthetic:?size=16", "images": 640} | options)
    return resolve(config, open_run_stream(config))


@pytest.mark.parametrize(
    ("asked", "recipe", "encoder"),
    [
        ({}, ADAPT, "mobilenet_v2"),
        ({"init": "random"}, SCRATCH, "compact"),
        ({"encoder": "compact"}, SCRATCH, "compact"),
        ({"width": 8}, SCRATCH, "resnet18"),
        ({"recipe": "paper", "width": 8}, PAPER, "resnet18"),
        ({"recipe": "paper", "encoder": "compact"}, PAPER, "compact"),
    ],
)
def test_a_plan_has_what_its_recipe_says(asked, recipe, encoder):
    plan = plan_of(**asked)
    assert plan.encoder == encoder
    assert plan.recipe is None
    same = set(recipe.as_options()) - {"buffer", "batch", "segment"}
    assert {name: getattr(plan, name) for name in same} == {name: getattr(recipe, name) for name in same}
    assert (plan.batch, plan.segment) == ((64, 64) if recipe is not PAPER else (256, 256))


def test_what_is_asked_for_stands_above_the_recipe():
    asked = {"lr": 0.5, "lr_half": 7, "policy": "fifo", "buffer": 32, "side": 0.5, "fresh": 0.25, "flip": "off"}
    plan = plan_of(init="random", **asked)
    assert {name: getattr(plan, name) for name in asked} == asked
    assert (plan.batch, plan.segment, plan.optimizer) == (32, 32, "muon")


def test_the_learning_rate_of_one_optimizer_is_none_for_another():
    with pytest.raises(UserError, match="the optimizer is adam, and the recipe's lr is for muon: give lr too"):
        plan_of(init="random", optimizer="adam")
    assert plan_of(init="random", optimizer="adam", lr=1e-3).optimizer == "adam"
    with pytest.raises(UserError, match="no optimizer 'moun': did you mean 'muon'"):
        plan_of(optimizer="moun", lr=1.0)


def test_unknown_recipes_are_refused():
    with pytest.raises(UserError, match="no recipe 'papre': did you mean 'paper'"):
        find_recipe("papre", True)
    with pytest.raises(UserError, match="no recipe 'small'"):
        Learner(recipe="small")


def test_a_plan_without_a_recipe_is_of_a_version_that_had_the_papers_alone():
    old = dataclasses.asdict(plan_of(recipe="paper", width=4))
    for name in ("optimizer", "side", "fresh", "lr_half", "projection", "positives", "precision"):
        del old[name]
    plan = RunPlan.of(json.loads(json.dumps(old)), "config.json")
    assert all(getattr(plan, name) == getattr(PAPER, name) for name in PAPER.as_options() if name not in old)


def test_a_learner_takes_the_recipe():
    device, paper = Learner(recipe="device"), Learner(resnet18(width=2))
    assert isinstance(device.encoder, Compact)
    assert isinstance(device.optimizer, Muon)
    assert isinstance(device.policy, Reservoir)
    assert (device.policy.horizon, device.views.side, device.batch_size) == (10, 0.75, 64)
    assert type(paper.optimizer) is Adam
    assert isinstance(paper.policy, ContrastScoring)
    assert (paper.buffer.size, paper.batch_size, paper.views.side) == (256, 256, 1.0)


def test_a_run_makes_the_learner_of_its_plan():
    learner = make_learner(plan_of(encoder="compact", width=2, policy="contrast", precision="bf16"))
    assert (learner.policy.fresh, learner.lr, learner.lr_half) == (SCRATCH.fresh, SCRATCH.lr, SCRATCH.lr_half)
    assert learner.model.in_bf16
    assert learner.positives == "time"


@pytest.mark.parametrize(
    ("lr_half", "rates"), [(0, [1.0, 1.0, 1.0]), (3, [1.0, 0.5**0.5, 3**-0.5]), (1, [1.0, 0.5, 7**-0.5])]
)
def test_the_learning_rate_falls_to_half(lr_half, rates):
    learner = Learner(resnet18(width=1), buffer=4, lr=1e-3, lr_half=lr_half)
    found = []
    for seed in range(3):
        learner.learn_many(random_images(4, size=8, seed=seed))
        found.append(learner.optimizer.lr / 1e-3)
    assert found == pytest.approx(rates)
    with pytest.raises(UserError, match="lr_half is -1: use at least 0"):
        Learner(resnet18(width=1), lr_half=-1)


def test_bfloat16_is_for_training_alone():
    encoder = resnet18(width=2)
    plain, half = (Learner(copy.deepcopy(encoder), buffer=8, precision=p) for p in ("fp32", "bf16"))
    images = random_images(8, size=16)
    assert torch.equal(plain.extractor()(images), half.extractor()(images))
    first, second = plain.learn_many(images), half.learn_many(images)
    assert first.loss != second.loss
    assert first.loss == pytest.approx(second.loss, abs=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in half.model.parameters())
    for options, why in (
        ({"precision": "fp16"}, "precision is 'fp16'"),
        ({"precision": "bf16", "memory": "1G"}, "fp32"),
    ):
        with pytest.raises(UserError, match=why):
            Learner(resnet18(width=1), **options)


def test_an_encoder_is_measured_at_each_of_the_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "FEW", 0.5)
    folder = make_folder(tmp_path / "images", size=8)
    config = dataclasses.asdict(RunOptions(source=f"folder:{folder}?passes=50", encoder="compact", width=2, images=600))
    config |= {"buffer": 8, "projection": "plain", "fractions": "0.5"}
    del config["out"]
    found = learn_for(tmp_path / "job", seconds=[1e-6, 1e6], held_back=True, **config)["marks"]
    assert [mark["images"] for mark in found.values()] == [8, 600]  # the stream ended before the second
    for mark in found.values():
        assert 0 <= mark["0.5"] <= 100
        assert 0 <= mark["least_replaced"] <= mark["replaced"] <= 1


def test_a_job_that_was_interrupted_ends_as_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "FEW", 0.5)
    folder = make_folder(tmp_path / "images", size=8)
    config = dataclasses.asdict(RunOptions(source=f"folder:{folder}?passes=50", encoder="compact", width=2, images=600))
    config |= {"buffer": 8, "fractions": "0.5"}
    del config["out"]
    whole = learn_for(tmp_path / "whole", seconds=[1e-6, 1e6], held_back=True, **config)
    measure = experiment._worth
    calls = iter([measure, None])
    monkeypatch.setattr(experiment, "_worth", lambda *given: next(calls)(*given))  # the second call fails
    with pytest.raises(TypeError):
        learn_for(tmp_path / "parts", seconds=[1e-6, 1e6], held_back=True, **config)
    monkeypatch.setattr(experiment, "_worth", measure)
    assert learn_for(tmp_path / "parts", seconds=[1e-6, 1e6], held_back=True, **config) == whole


def test_how_long_the_experiment_takes_is_known_from_its_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("streamclr.sweeps.lab._step_seconds", lambda kind: pytest.fail("no step is timed"))
    lab = Lab(LabOptions(out=str(tmp_path), workers=2))
    settings = {"source": "synthetic:", "encoder": "compact", "width": 4, "stem": None, "images": 10**6}
    jobs = [job.doing("recipe", learn_for, seconds=[100, 1800], held_back=True) for job in lab.runs(**settings)]
    assert lab._expected(jobs) == "about 45 minutes of learning on 2 x cpu, evaluation not counted"
