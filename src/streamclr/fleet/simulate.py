"""A fleet in one machine, for research: Flower's simulation engine, each device a part of a dataset."""

import dataclasses
import logging
import os
import random
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.swa_utils import update_bn

from streamclr.base.errors import UserError
from streamclr.base.files import write_json
from streamclr.base.statistics import evenly_spaced
from streamclr.base.tensors import load_weights
from streamclr.encoders.inference import as_float
from streamclr.fleet.device import Device, LabelledImages
from streamclr.fleet.flower import need_flower
from streamclr.fleet.options import SimulateOptions
from streamclr.fleet.rounds import Rounds, read_rounds
from streamclr.fleet.split import shard, whole_of
from streamclr.records.label_budget import LabelBudget
from streamclr.records.options import as_run
from streamclr.records.plan import RunPlan, resolve
from streamclr.runs.evaluation import extract, probes
from streamclr.streams.datasets.images import DatasetSource, Images
from streamclr.streams.stream import DatasetStream

if TYPE_CHECKING:
    from flwr.app import ConfigRecord, Context
    from flwr.serverapp import Grid

N_GATHERED = 2048  # images for the statistics of BatchNorm where devices keep theirs


def simulate(options: SimulateOptions) -> tuple[Path, dict[str, Any]]:
    """Run the rounds that the directory still lacks, then the probes. Returns the directory and the results."""
    learner, out = prepared(options)
    results = evaluate(options, run_rounds(options, learner, out))
    write_json(out / "results.json", results)
    return out, results


def run_rounds(options: SimulateOptions, learner: RunPlan, out: Path) -> Rounds:
    """The rounds that are left."""
    need_flower(simulation=True)
    fixed = {name: getattr(options, name) for name in ("devices", "split", "dropout", "labels", "guards")}
    with closing(Rounds(out, learner, options.of_the_rounds | fixed)) as rounds:
        if rounds.n_rounds < options.rounds:
            _run(options, learner, rounds)
        if rounds.n_rounds < options.rounds:
            raise UserError(f"the simulation ended after round {rounds.n_rounds}: start it again to go on")
    lines = read_rounds(out)
    if not any(line["taken"] for line in lines):
        why = next((why for line in lines for why in line["failed"].values()), "none answered")
        raise UserError(f"no device has learned anything in {len(lines)} rounds ({why}): see {out / 'rounds.jsonl'}")
    return rounds


def prepared(options: SimulateOptions) -> tuple[RunPlan, Path]:
    """The plan of a device's learner, and the directory. All options are checked before anything is written."""
    options.check()
    if not 0 <= options.dropout < 1:
        raise UserError(f"dropout is {options.dropout}: use 0 or more, below 1")
    if options.min_devices > options.devices:
        raise UserError(f"min_devices is {options.min_devices}, and there are {options.devices} devices: use fewer")
    if options.workers is not None and options.workers < 1:
        raise UserError(f"workers is {options.workers}: use at least 1")
    if options.labels is not None:
        LabelBudget.parse(options.labels)
    plan = resolve(as_run(options, images=options.rounds * options.round_images), DatasetStream(_shard(options, 0)))
    return dataclasses.replace(plan, images=None, out=None, checkpoint_minutes=0), Path(options.out)


def _run(options: SimulateOptions, learner: RunPlan, rounds: Rounds) -> None:
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from streamclr.fleet.apps import client_app
    from streamclr.fleet.strategy import Fleet

    logging.getLogger("flwr").setLevel(logging.ERROR)  # a round is one line, which `Rounds` prints
    server = ServerApp()

    @server.main()
    def main(grid: "Grid", context: "Context") -> None:
        while len(list(grid.get_node_ids())) < options.devices:  # the engine is still starting them
            time.sleep(0.1)
        Fleet(rounds, options).run(grid)

    # "local": never a cluster that somebody else runs on this machine.
    ray = {"address": "local", "num_cpus": options.workers or os.cpu_count() or 1}
    ray |= {"object_store_memory": 200 * 2**20, "log_to_driver": False}
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": ray}
    device = client_app(partial(simulated, options, learner, (rounds.path / "devices").resolve()))
    run_simulation(server, device, options.devices, backend_config=backend)


def simulated(
    options: SimulateOptions, learner: RunPlan, home: Path, context: "Context", told: "ConfigRecord"
) -> Device:
    """The device of this call, in one of Ray's processes."""
    torch.set_num_threads(1)  # there are as many of these processes as cores
    number = int(context.node_config["partition-id"])
    if "images" in told and drops_out(options, int(told["round"]), number):
        raise UserError("dropped out")
    source = _shard(options, number)
    home.mkdir(parents=True, exist_ok=True)
    own = dataclasses.replace(learner, seed=learner.seed + number, out=str(home / f"{number:04}"))
    labelled = partial(_labelled, source.streamed, options, number)
    return Device(own, DatasetStream(source), options.statistics, labelled)


def _shard(options: SimulateOptions, device: int) -> DatasetSource:
    return shard(options.source, options.split, device, options.devices, options.stc, options.seed, options.size)


def drops_out(options: SimulateOptions, round_: int, device: int) -> bool:
    return random.Random(f"{options.seed} {round_} {device}").random() < options.dropout


def _labelled(images: Images, options: SimulateOptions, device: int) -> LabelledImages:
    """A draw of the device's images, as if somebody had labelled them."""
    n = 0 if options.labels is None else LabelBudget.parse(options.labels).of(len(images), least=1)
    numbers = np.random.default_rng([options.seed, device]).permutation(len(images))[:n]
    names = [images.classes[label] for label in images.labels[numbers].tolist()]
    return LabelledImages(torch.from_numpy(images.images(numbers)) if n else torch.empty(0), names)


def evaluate(options: SimulateOptions, rounds: Rounds) -> dict[str, Any]:
    """Probes of the global encoder on all labels, its classifier on the test images, and counts over the rounds."""
    whole, model = whole_of(options.source, options.size), rounds.kept_model()
    assert whole.train is not None
    assert whole.test is not None
    if options.statistics == "local":  # the fleet has no statistics of BatchNorm: gather them from some of the images
        numbers = evenly_spaced(len(whole.streamed), N_GATHERED)
        parts = np.array_split(numbers, -(-len(numbers) // 256))
        update_bn((as_float(torch.from_numpy(whole.streamed.images(part))) for part in parts), model)
    known, tested = extract(model, whole.train), extract(model, whole.test)
    results: dict[str, Any] = dict(probes(known, tested, len(whole.classes)))
    if (head := rounds.head) is not None:
        # Of an earlier round, if the last label round had too few: with the encoder that it goes with.
        load_weights(model, {**model.state_dict(), **head.encoder}, "the fleet's classifier")
        tested = extract(model, whole.test)
        names = [head.classes[row] for row in head.classifier()(tested.features).argmax(1).tolist()]
        right = [whole.classes[label] == name for label, name in zip(tested.labels.tolist(), names, strict=True)]
        results |= {"classifier": sum(right) / len(right), "n_labels": head.n_labels}
    lines = read_rounds(rounds.path)
    return results | {
        "rounds": rounds.n_rounds,
        "images": sum(line["n_images"] for line in lines),
        "answers": sum(len(line["taken"]) for line in lines),
        "failed": sum(len(line["failed"]) for line in lines),
        "silent": sum(line["silent"] for line in lines),
        "refused": dict(rounds.refused),
        "seconds": sum(line["seconds"] for line in lines),
    }
