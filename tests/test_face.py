"""The public face: its names, what they look like when printed, and what a type checker says of them."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import streamclr
from streamclr import (
    BYOL,
    CLA,
    SCALE,
    ArrayImages,
    Buffer,
    ContrastScoring,
    Guarded,
    Head,
    KCenter,
    Learner,
    MinRed,
    Mixture,
    Reservoir,
    ScoredReservoir,
    StrongViews,
    mobilenet_v2,
    open_stream,
    resnet18,
)
from streamclr.recipe import build_loss
from support.images import random_images


def test_it_lists_its_names():
    assert set(streamclr.__all__) <= set(dir(streamclr))
    assert {"Learner", "open_stream", "nt_xent", "evaluate", "Loss", "Source"} <= set(streamclr.__all__)
    for name in streamclr.__all__:
        assert inspect.getdoc(getattr(streamclr, name)), name


def test_a_type_checker_knows_the_same_names():
    """Those below TYPE_CHECKING are those that are imported on first use."""
    text = Path(streamclr.__file__).read_text().partition("if TYPE_CHECKING")[2].partition("_MODULES")[0]
    assert sorted(name for name, same in re.findall(r"(\w+) as (\w+)", text) if name == same) == streamclr.__all__
    for name in streamclr.__all__:
        module = importlib.import_module(f"streamclr.{streamclr._MODULE_OF[name]}")
        assert getattr(module, name) is getattr(streamclr, name)


def test_a_learner_tells_its_shape():
    learner = Learner(mobilenet_v2(), "reservoir", buffer="1M", batch_size=4, device="cpu")
    assert repr(learner) == "Learner(mobilenet_v2, buffer 0 of 1M, step 0)"
    small = Learner(resnet18(2), buffer=8, device="cpu")
    for seed in range(2):
        small.learn_many(random_images(6, seed=seed))
    assert repr(small) == "Learner(resnet18, buffer 8 of 8, step 2)"
    assert repr(small.buffer) == "Buffer(8 of 8, 3 x 16 x 16)"
    assert repr(small.extractor()) == "FeatureExtractor(ResNet, 16 features)"
    own = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 4))
    assert repr(Learner(own, buffer=8, device="cpu")) == "Learner(Sequential, buffer 0 of 8, step 0)"
    assert repr(small.buffer.pool(random_images(3))) == "Pool(11 images, 8 of them in the buffer)"


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (ContrastScoring(), "ContrastScoring()"),
        (ContrastScoring(rescore_every=50, fresh=0.1), "ContrastScoring(rescore_every=50, fresh=0.1)"),
        (Guarded(Reservoir(horizon=10), "noise,blank"), "Guarded(Reservoir(horizon=10), noise,blank)"),
        (Mixture(share=0.25), "Mixture(share=0.25)"),
        (ScoredReservoir(times=3), "ScoredReservoir(times=3)"),
        (KCenter(seed=3), "KCenter(seed=3)"),
        (MinRed(), "MinRed()"),
        (StrongViews(flip=False), "StrongViews(flip=False)"),
        (SCALE(), "SCALE()"),
        (BYOL(momentum=0.9), "BYOL(momentum=0.9)"),
        (CLA(weight=0.5), "CLA(weight=0.5)"),
        (build_loss("nt-xent"), "Loss(nt_xent)"),
        (Head(12, 3), "Head(12 features, 3 classes)"),
        (Buffer(8), "Buffer(0 of 8, no images yet)"),
    ],
)
def test_parts_tell_what_is_not_usual_of_them(part, shown):
    assert repr(part) == shown


def test_data_tells_its_shape():
    images = random_images(6)
    assert repr(open_stream(images, passes=2)) == "DatasetStream(images, at image 0 of 12)"
    assert repr(open_stream("synthetic:")) == "DatasetStream(synthetic, at image 0)"
    assert repr(open_stream(iter(images))) == "FrameStream(frames, at image 0)"
    assert (
        repr(ArrayImages(images.numpy(), torch.arange(6).numpy() % 2, "ab"))
        == "ArrayImages(6 x 3 x 16 x 16, 2 classes)"
    )


PROGRAM = """\
import torch
from torch import Tensor, nn

import streamclr
from streamclr import (
    ContrastScoring, Learner, Loss, Policy, Pool, Source, Step, StrongViews, UserError, contrast_score, evaluate,
    features_of, fit_linear, from_pretrained, knn_probe, nt_xent, open_stream, resnet18,
)


class Brightest:
    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        return pool.images.float().mean((1, 2, 3)).topk(size).indices


class Own(Loss):
    def forward(self, z0: Tensor, z1: Tensor, *targets: Tensor) -> Tensor:
        return (z0 * z1).sum()


def views(images: Tensor, generator: torch.Generator) -> Tensor:
    return images / 255


policy: Policy = Brightest()
learner = Learner(resnet18(width=8), policy, buffer="1M", loss=Own(), views=views, weak_view=lambda x: x.flip(-1))
learner = Learner("mobilenet_v2", "contrast", loss=nt_xent, views=StrongViews(flip=False))
for images in open_stream("synthetic:").segments(64, until=128):
    step: Step = learner.learn_many(images)
    print(step, learner)
stream = open_stream([images])
features: Tensor = features_of(learner, images)
head = fit_linear(features, torch.zeros(64).long(), 2)
score: Tensor = contrast_score(learner.model, images)
results, chosen = evaluate(learner, (images, [0]), (images, [0]))
"""
MISTAKES = """
learner.learn_many("images")
Learner(buffer=1.5)
learner.learn(images)
"""


@pytest.mark.system
def test_a_strict_type_checker_takes_a_program_of_all_of_it_and_finds_its_mistakes(tmp_path):
    pytest.importorskip("mypy")
    for name, text in (("right", PROGRAM), ("wrong", PROGRAM + MISTAKES)):
        (tmp_path / f"{name}.py").write_text(text)
    words = ["-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent"]

    def checked(name):
        command = [sys.executable, *words, str(tmp_path / f"{name}.py")]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    right, wrong = checked("right"), checked("wrong")
    assert right.returncode == 0, right.stdout
    found = [line.rpartition("[")[2].rstrip("]") for line in wrong.stdout.splitlines() if ": error:" in line]
    assert found == ["arg-type", "arg-type", "attr-defined"], wrong.stdout
