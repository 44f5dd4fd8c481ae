import json
import subprocess
import sys

import pytest
import torch

from streamclr import Learner, UserError, resnet18
from streamclr.base.options import parse_size
from streamclr.compute.memory import MIB, resident
from support.images import random_images


@pytest.mark.parametrize(
    ("text", "size"),
    [("600M", 600 * MIB), ("1.5G", 1536 * MIB), ("1g", 1024 * MIB), ("512MiB", 512 * MIB), (" 64 KB ", 65536), (7, 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "600X", "-1M", "0", "1e9", "M", "1 2M", "nan", 0, -5])
def test_what_is_no_size_is_said(text):
    with pytest.raises(UserError, match=r"as 600M or 1\.5G"):
        parse_size(text)


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_works():
    learner = Learner(resnet18(8), buffer=16, memory="30M", device="cpu")
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    with pytest.raises(UserError, match=r"use \d+M or more") as error:
        learner.learn_many(random_images(16))
    least = int(str(error.value).split("use ")[1].split("M")[0])
    assert resident() / MIB < least < resident() / MIB + 200
    assert len(learner.buffer) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items())
    Learner(resnet18(8), buffer=16, memory=f"{least + 20}M", device="cpu").learn_many(random_images(16))


def test_planning_changes_nothing_that_learning_depends_on():
    steps = []
    for memory in (None, "100G"):
        torch.manual_seed(0)
        learner = Learner(resnet18(8), buffer=8, memory=memory, seed=2, device="cpu")
        random_state = torch.get_rng_state()
        steps.append([learner.learn_many(random_images(8, seed=i)).loss for i in range(3)])
        assert torch.equal(torch.get_rng_state(), random_state)
    assert learner.plan.chunk_size is None
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_memory_and_compile_exclude_each_other():
    with pytest.raises(UserError, match="both memory and compile"):
        Learner(resnet18(8), memory="1G", compile=True, device="cpu")


@pytest.mark.system
@pytest.mark.parametrize(
    ("encoder", "size", "train", "extra"),
    [
        ('"resnet18", 32, width=32, norm="group"', 32, "all", 40),
        ('"resnet18", 32, width=32', 32, "all", 120),
        ('"mobilenet_v2", 64', 64, "all", 160),
        ('"mobilenet_v2", 64', 64, "3", 110),
    ],
)
def test_the_peak_is_as_predicted_and_within_the_budget(encoder, size, train, extra, tmp_path):
    """In a process of its own, a checkpoint included; width 32 is wide enough for the activations to matter."""
    code = f"""
import json, torch
torch.set_num_threads(1)
from pathlib import Path
from streamclr import Learner
from streamclr.compute.memory import MIB, peak, resident
from streamclr.encoders.architecture import Architecture
from streamclr.records.checkpoints import Checkpoints
model = Architecture.resolve({encoder}).make_model()
learner = Learner(model, train={train!r}, buffer=64, device="cpu", memory="100G")
images = torch.randint(256, (64, 3, {size}, {size}), dtype=torch.uint8)
learner.fit(images.shape)
learner.memory, learner.plan = resident() + {extra} * MIB, None
for number in range(2):
    learner.learn_many(images)
    Checkpoints(Path({str(tmp_path)!r})).save(number, learner.state_dict(copy=False))
print(json.dumps([learner.memory, learner.plan.chunk_size, learner.plan.peak, peak()]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    budget, chunk_size, predicted, measured = json.loads(out)
    assert 1 <= chunk_size < 128
    assert measured <= budget
    assert abs(predicted - measured) < 0.1 * measured
