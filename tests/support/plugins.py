"""Parts of a researcher, in a file outside of the package."""

import os
import sys

# A policy, in fifteen lines.
POLICY = """\
import torch


class Brightest:
    def __init__(self, share: float = 1.0, seed: int = 0):
        self.share, self.generator = share, torch.Generator().manual_seed(seed)

    def keep(self, pool, size, model):
        n = round(self.share * size)
        order = pool.images.float().mean((1, 2, 3)).argsort(descending=True)
        rest = order[n:][torch.randperm(len(order) - n, generator=self.generator)]
        return torch.cat([order[:n], rest])[:size]

    def state_dict(self): return {"generator": self.generator.get_state()}
    def load_state_dict(self, state): self.generator.set_state(state["generator"])
"""
assert len([line for line in POLICY.splitlines() if line]) <= 15

# A loss, in ten.
LOSS = """
from torch.nn import functional as F

def decorrelated(z0, z1, weight: float = 1.0):
    agree = (z0 - z1).square().sum(1).mean()
    z = F.normalize(z0 - z0.mean(0), dim=0)
    return agree + weight * (z.T @ z).square().mean()
"""
assert len([line for line in LOSS.splitlines() if line]) <= 10

MORE = """
def shaded(images, generator, least: float = 0.5):
    light = torch.rand(len(images), 1, 1, 1, generator=generator) * (1 - least) + least
    return images / 255 * light


def turned(images):
    return images.flip(-1, -2)


def function(pool, size, model):
    return torch.arange(size)


NUMBER = 7
"""


def forget(*modules):
    """As in a new process."""
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]


def at_home(directory, monkeypatch):
    """A directory with `mine.py`, in which commands are given, as those of `streamclr` are: it is not on the path."""
    directory.mkdir(exist_ok=True)
    (directory / "mine.py").write_text(POLICY + LOSS + MORE)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(directory))])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # it is as before afterwards
    forget("mine")
    return directory
