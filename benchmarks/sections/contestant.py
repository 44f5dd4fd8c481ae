"""One side of `rivals`, in a process of its own: python -m sections.contestant SIDE ENCODER STEPS

For each line that it reads it takes so many steps, and tells their cost as JSON; at the end its peak memory, and what
its workers have beside it.
"""

import copy
import itertools
import json
import sys

import torch
from torch import nn

from streamclr import StrongViews
from streamclr.compute.allocator import keep_freed_memory
from streamclr.compute.memory import peak

from .measure import Case, below, cost_of, private_bytes
from .plain_simclr import PlainLoop, SimCLR
from .subjects import COMPACT, MOBILENET_64, Subject, frames, full

SUBJECTS = {"compact": COMPACT, "mobilenet_v2": MOBILENET_64}
ALIKE = {"train": "all", "views": StrongViews()}  # all layers learn, and views are as large as the images


def ours(subject: Subject, n_steps: int, **options: object) -> Case:
    """A learner as by default, with the allocator as `streamclr run` sets it, and a full buffer."""
    keep_freed_memory()
    learner = full(subject.make(**options), subject.size)
    segments = itertools.cycle(frames(16 * learner.batch_size, subject.size, 10**6).split(learner.batch_size))

    def turn() -> None:
        for segment in itertools.islice(segments, n_steps):
            learner.learn_many(segment)

    return turn


def ours_alike(subject: Subject, n_steps: int) -> Case:
    return ours(subject, n_steps, **ALIKE)


def plain(subject: Subject, n_steps: int, **parts: object) -> Case:
    """The plain loop on the same encoder, with as many images in a batch. Each turn is an epoch."""
    learner = subject.make()
    images = frames(n_steps * learner.batch_size, subject.size).permute(0, 2, 3, 1).contiguous().numpy()
    model = SimCLR(layers_of(learner.encoder), learner.model.n_features)
    return PlainLoop(model, images, learner.batch_size, **parts).epoch


def lightly(subject: Subject, n_steps: int) -> Case:
    """The same with lightly's own transform and loss, as in its example."""
    import_lightly()
    from lightly.loss import NTXentLoss
    from lightly.transforms import SimCLRTransform

    own = {} if subject.size >= 64 else {"gaussian_blur": 0.0}
    return plain(subject, n_steps, view=SimCLRTransform(subject.size, **own).transforms[0], loss=NTXentLoss())


def import_lightly() -> None:
    """With a torchvision that was built for another torch, too: its compiled operators, which do not load then, are for
    detection. Those that its import asks for are declared, and nobody calls them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(operators)  # they go with the object
    import lightly.transforms  # noqa: F401


KEPT: list[torch.library.Library] = []


def layers_of(encoder: nn.Module) -> nn.Module:
    """The encoder's layers without the memory format that its forward pass gives to the images; all of them learn."""
    layers = [layer for stage in encoder.stages for layer in stage]
    return copy.deepcopy(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))).requires_grad_()


SIDES = {side.__name__: side for side in (ours, ours_alike, plain, lightly)}


def main() -> None:
    side, encoder, n_steps = sys.argv[1:]
    turn = SIDES[side](SUBJECTS[encoder], int(n_steps))
    for _ in sys.stdin:
        print(json.dumps(cost_of(turn)), flush=True)
    print(json.dumps([peak(), sum(map(private_bytes, below()))]), flush=True)


if __name__ == "__main__":
    main()
