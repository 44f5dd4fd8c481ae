"""What the processes of a job do, by name: `torchrun rank_jobs.py DIRECTORY NAME …`. Each rank leaves what it found."""

import sys
from pathlib import Path

import torch

from streamclr.base.errors import NotFinite, QuietExit, UserError
from streamclr.compute.ranks import Ranks
from streamclr.encoders.inference import seeded
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import resnet18
from streamclr.learner import Learner
from streamclr.policy import FIFOReplace
from streamclr.recipe import LOSSES
from streamclr.views import StrongViews
from support.images import random_images

SIZE, N_STEPS = 16, 20


class RankViews(StrongViews):
    """This rank's rows of the views that one process would draw for all images."""

    def __init__(self, ranks, dtype):
        super().__init__()
        self.ranks, self.dtype = ranks, dtype

    def apply(self, images, draw):
        return super().apply(images, draw).to(self.dtype)

    def draw(self, shape, generator):
        whole = super().draw((shape[0] * self.ranks.n, *shape[1:]), generator)
        n = shape[0] // 2
        rows = torch.arange(self.ranks.index * n, (self.ranks.index + 1) * n)
        return whole.rows(torch.cat([rows, rows + n * self.ranks.n]))


class AtOnce:
    """The same views from a function that cannot make them in chunks."""

    def __init__(self, views):
        self.views = views

    def __call__(self, images, generator):
        return self.views.apply(images, self.views.draw(images.shape, generator))


def learner(ranks, norm, n, dtype=torch.float32, train="all", projection="plain", precision="fp32", **options):
    """n: images of a step on all ranks together."""
    with seeded(3 + ranks.index):  # the first rank's weights become those of all
        model = ContrastiveModel(resnet18(8, "small", norm), projection=projection).to(dtype)
    made = Learner(
        model, FIFOReplace(), n // ranks.n, views=RankViews(ranks, dtype), train=train, precision=precision,
        seed=3 + ranks.index, device="cpu", **options,
    )  # fmt: skip
    made.join(ranks)
    made.generator.manual_seed(3)  # the same on all ranks: each takes its rows of one draw
    return made


def learn(ranks, norm, n, n_steps=N_STEPS, dtype=torch.float32, **part):
    """Losses, gradients and running statistics of the first step, weights of the last."""
    one = learner(ranks, norm, n, dtype, **part)
    losses, first = [], {}
    for step in range(n_steps):
        images = random_images(n, SIZE, seed=step).chunk(ranks.n)[ranks.index]
        losses.append(one.learn_many(images).loss)
        if not step:
            first = {name: p.grad.clone() for name, p in one.model.named_parameters() if p.requires_grad}
            statistics = {name: buffer.clone() for name, buffer in one.model.named_buffers()}
    one.ranks.unshare(one.model)
    found = {"losses": losses, "gradients": first, "statistics": statistics, "state": one.model.state_dict()}
    return found | {"loss": one.loss.state_dict()}


def group(ranks):
    return learn(ranks, "group", 24, dtype=torch.float64)


def group_256(ranks):
    return learn(ranks, "group", 256)


def group_256_double(ranks):
    return learn(ranks, "group", 256, dtype=torch.float64)


def batch(ranks):
    return learn(ranks, "batch", 24, dtype=torch.float64)


def part(ranks):
    """The last stages learn, and the head has BatchNorm too."""
    return learn(ranks, "batch", 24, 5, torch.float64, train="3", projection="batchnorm")


def orthogonal(ranks):
    """Each rank keeps the history of the gradient that all share."""
    return learn(ranks, "group", 24, 6, torch.float64, optimizer="orthogonal-adam", lr=1e-4)


def bf16(ranks):
    return learn(ranks, "batch", 24, 3, precision="bf16")


def losses(ranks):
    """Of each loss; those with weights or state of their own have other ones on each rank before they begin."""
    return {name: learn(ranks, "group", 24, 4, torch.float64, loss=name) for name in LOSSES}


def at_once(ranks):
    one = learner(ranks, "group", 24, torch.float64)
    one.views = AtOnce(one.views)
    found = []
    for step in range(3):
        found.append(one.learn_many(random_images(24, SIZE, seed=step).chunk(ranks.n)[ranks.index]).loss)
    return {"losses": found}


def own(ranks):
    ranks.norm_over = "own"
    found = learn(ranks, "batch", 24, 3, torch.float64)
    ranks.norm_over = "all"
    return found


def agreed(ranks):
    """What one rank knows, all know; what breaks on one breaks on all."""
    found = {"largest": ranks.largest(ranks.index, -ranks.index), "collected": ranks.collect({"rank": ranks.index})}

    def told(how, *broken):
        try:
            with ranks.together():
                if ranks.index in broken:
                    raise how(f"rank {ranks.index}")
        except (UserError, QuietExit) as error:
            return type(error).__name__, str(error)
        return None

    found["nobody"] = told(UserError)
    found["last"] = told(UserError, ranks.n - 1)
    found["all"] = told(UserError, *range(ranks.n))
    found["not finite"] = told(NotFinite, ranks.n - 1)
    one = learner(ranks, "group", 24)
    before = one.model.state_dict()["head.0.weight"].clone()
    if ranks.index == 1:
        one.model.head[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    try:
        one.learn_many(random_images(24, SIZE, seed=0).chunk(ranks.n)[ranks.index])
    except NotFinite as error:
        found["broken gradient"] = str(error)
    found["unchanged"] = torch.equal(before, one.model.state_dict()["head.0.weight"]), len(one.buffer)
    try:
        learner(ranks, "group", 24).learn_many(random_images(3 + ranks.index, SIZE))
    except UserError as error:
        found["batches"] = str(error)
    return found


JOBS = {
    job.__name__: job
    for job in (group, group_256, group_256_double, batch, part, orthogonal, bf16, losses, at_once, own, agreed)
}


def main(directory, *names):
    with Ranks(torch.device("cpu")) as ranks:
        found = {name: JOBS[name](ranks) for name in names}
        torch.save(found, Path(directory) / f"{ranks.index}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
