"""Run directories, and what is in them."""

import dataclasses
import hashlib

import torch

from streamclr.base.files import write_json
from streamclr.base.tensors import load_tensors, save_tensors
from streamclr.classifier import Head
from streamclr.encoders.inference import infer
from streamclr.models.heads import Heads
from streamclr.records.checkpoints import Checkpoints
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.records.plan import RunPlan
from support.images import make_folder, random_images


def run_plan(**options):
    filled = {"size": 32, "buffer": 256, "batch": 256, "segment": 256, "stem": "small", "guards": "off"}
    filled |= {"encoder": "resnet18", "policy": "contrast", "lr": 1e-4, "temperature": 0.5} | options
    usual = "plain" if filled["encoder"].startswith("resnet") else "batchnorm"
    return RunPlan(**{"projection": usual} | filled)


def made_run(path, size=32, n_batches=3, **options):
    """A run directory with a model that has seen a few images."""
    config = run_plan(size=size, **{"width": 4} | options)
    directory = RunDirectory(path)
    path.mkdir()
    write_json(path / "config.json", dataclasses.asdict(config))
    torch.manual_seed(0)
    model = config.architecture.make_model()
    for seed in range(n_batches):
        model(random_images(16, size, seed) / 255)
    head = Head(model.n_features, 5)
    head.fit_scale(infer(model, random_images(64, size), model.features))
    torch.nn.init.normal_(head.linear.weight, std=0.3 * (32 / model.n_features) ** 0.5)
    directory.save_model(model)
    Heads(directory).save_fractions({1.0: head}, tuple("abcde"))
    save_tensors(path / "buffer.safetensors", {"images": random_images(48, size)})
    directory.save_results({"images": 48, "labels": {}})
    return directory


COMPACT = {"encoder": "compact", "width": 8, "stem": None}
MOBILENET = {  # for made_run; with fewer batches its statistics are far from those of any image
    "encoder": "mobilenet_v2", "width": None, "stem": None, "n_batches": 60,
}  # fmt: skip


def small_options(path):
    """Options of a run of 50 images of two classes, which are made in `path`."""
    return RunOptions(
        source=f"folder:{make_folder(path / 'images')}", recipe="paper", buffer=8, width=2, lr=1e-3, stc=5, images=50,
        probes=2, fractions="0.1,1", classifier="linear", seed=4, out=str(path / "run"),
    )  # fmt: skip


def content(path):
    """What a run has learned, whatever the clock said; what left the buffer last is only there to be looked at."""
    clocks = ("seconds_scoring", "seconds_training", "time", "memory")
    steps = [{k: v for k, v in step.items() if k not in clocks} for step in RunDirectory(path).steps()]
    states = [load_tensors(path / f"{name}.safetensors") for name in ("model", "buffer", "classifier")]
    kept = [{name: t.tolist() for name, t in state.items() if not name.startswith("left_")} for state in states]
    return steps, str(kept)


def state_sha256(path):
    """Of everything in the last checkpoint but the time that it took."""
    _, state = Checkpoints(path / "checkpoints").latest()
    digest = hashlib.sha256()

    def add(tree, name=""):
        if isinstance(tree, torch.Tensor):
            digest.update(name.encode() + tree.contiguous().numpy().tobytes())
        elif isinstance(tree, dict):
            for key in sorted(tree.keys() - {"seconds"}):
                add(tree[key], f"{name}/{key}")
        elif isinstance(tree, list):
            for i, value in enumerate(tree):
                add(value, f"{name}/{i}")
        else:
            digest.update(f"{name}={tree!r}".encode())

    add(state)
    return digest.hexdigest()


def classifier_of(directory):
    return Heads(directory).load()
