"""Run directories with a label queue, and versions of their classifier."""

import dataclasses

import torch
import torch.nn.functional as F

from streamclr.base.files import write_json
from streamclr.classifier import Classifier, Head
from streamclr.encoders.inference import seeded
from streamclr.labelling.candidates import Candidates
from streamclr.labelling.session import LabelSession
from streamclr.models.versions import Score, Version
from streamclr.records.directory import RunDirectory
from support.runs import run_plan

SIZE, COLOURS = 16, 3


def colours(n, seed=0):
    """Images of three classes, told apart by their colour; the class of an image is its number modulo 3."""
    generator = torch.Generator().manual_seed(seed)
    images = F.interpolate(torch.randint(100, (n, 3, 4, 4), generator=generator).float(), SIZE, mode="bicubic")
    images = images.clamp(0, 120).byte() + torch.randint(10, (n, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    images[torch.arange(n), torch.arange(n) % COLOURS] += 100
    return images


def make_run(path, images=None, budget="30", finished=True, step=None, clip=1, tracks=None, **options):
    """A run directory with a label queue, without a run: an encoder that has learned nothing."""
    images = colours(90) if images is None else images
    settings = {"source": "synthetic:", "images": len(images), "size": SIZE, "width": 1, "stem": "small"} | options
    path.mkdir(exist_ok=True)
    write_json(path / "config.json", dataclasses.asdict(run_plan(label_budget=budget, **settings)))
    candidates = Candidates(path / "candidates.bin", -(-len(images) // clip), (3, SIZE, SIZE), clip=clip)
    candidates.offer(images, 0, tracks)
    candidates.close()
    if step is not None:
        reach(path, step)
    if finished:
        finish(path)
    return path


def encoder(path, seed=0):
    with seeded(seed):
        return RunDirectory(path).config.architecture.make_model()


def reach(path, step):
    RunDirectory(path).checkpoints.save(step, {"learner": {"model": encoder(path, step).state_dict()}})


def finish(path):
    RunDirectory(path).save_model(encoder(path))
    RunDirectory(path).save_results({"labels": {}})


def opened(path, **how):
    one = LabelSession(RunDirectory(path))
    one.prepare(**how)
    return one


def keys(one):
    return [question.key for question in one.labels.questions()]


CLASSES = ("red", "green", "blue")


def make_version(directory, seed=0, classes=CLASSES, score=Score(4, 5, 0.5), step=7):  # noqa: B008
    model = encoder(directory.path, seed)
    head = Head(model.n_features, len(classes))
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(seed))
    keys = frozenset({"a", "b"}), frozenset({"c"})
    by_class = {classes[0]: (score.right, score.n)}
    return Version(Classifier(model, head, classes, 16), step, *keys, score, by_class=by_class)
