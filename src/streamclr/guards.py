"""Guards against frames that lie: what can teach nothing is hidden from the policy, which would hoard it."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.buffer import Pool, checked_keep
from streamclr.policy import Policy

# From the least bad to the worst: in this order they come back where too few images are left.
GUARDS = ("stay", "duplicates", "quarantine", "smear", "noise", "blank")


class Guarded:
    """A policy that does not see the frames that lie; it chooses among the others as it always does.

    guards: `on` (all of them), or some of these with commas between.
        duplicates: images that look the same count once (mean difference of the pixels, of 255, up to `tolerance`).
        blank: black and covered frames, without any contrast but that of the sensor's noise.
        noise: frames whose neighbouring pixels have nothing to do with each other.
        smear: frames with a quarter of their rows or columns the same as the one before, which no sensor sees.
        stay: an image leaves when `stay` times as many images as the buffer holds have come after it.
        quarantine: what looks like the images whose score does not fall in `patience` steps of training, if these look
            so `over` times as often as the stream does.
    """

    def __init__(
        self,
        policy: Policy,
        guards: str = "on",
        tolerance: float = 0.5,
        stay: float = 64,
        patience: int = 2,
        over: float = 1.75,
    ):
        self.policy, self.guards = policy, parse_guards(guards)
        if not (tolerance >= 0 and stay > 0 and patience >= 1 and over >= 1):
            raise UserError(
                f"tolerance ({tolerance}) must not be below 0, stay ({stay}) above it, "
                f"patience ({patience}) and over ({over}) not below 1"
            )
        self.tolerance, self.stay, self.patience, self.over = tolerance, stay, patience, over
        self.kept_out: Counter[str] = Counter()  # images that the policy did not see, by the guard that hid them
        self.hidden: dict[int, str] = {}  # arrival number: the guard that hid it from the last choice
        self.seconds = dict.fromkeys(self.guards, 0.0)  # that each guard took, in this process
        self._entered: dict[int, float] = {}  # arrival number: score on entering the buffer; inf once it is a suspect
        self._suspects = Memory(N_SUSPECTS)
        self._stream = Memory(N_STREAM)

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        why, look = self._hide(pool, size)
        seen = why < 0
        if int(seen.sum()) < size:  # too few: the least bad ones come back
            seen[why.argsort(stable=True)[:size]] = True
        arrivals, worst = pool.arrival[~seen].tolist(), why[~seen].tolist()
        self.hidden = {arrival: GUARDS[number] for arrival, number in zip(arrivals, worst, strict=True)}
        self.kept_out.update(self.hidden.values())
        if bool(seen.all()):
            keep = checked_keep(self.policy.keep(pool, size, model), pool, size)
        else:
            rows = seen.nonzero()[:, 0]
            n_buffer = int(seen[: pool.n_buffer].sum())
            view = Pool(pool.images[rows], pool.score[rows], pool.age[rows], pool.arrival[rows], n_buffer)
            keep = rows[checked_keep(self.policy.keep(view, size, model), view, size)]
            pool.score[rows] = view.score
            pool.n_rescored += view.n_rescored
        if look is not None:
            self._note(pool, keep, look)
        return keep

    def _hide(self, pool: Pool, size: int) -> tuple[Tensor, Tensor | None]:
        """For each image the number of the worst guard that hides it, or -1; and its looks, if they were needed."""
        look = None

        def quarantined() -> Tensor:
            nonlocal look
            look = looks(pool.images).cpu()
            return self._quarantined(pool, look)

        hides: dict[str, Callable[[], Tensor]] = {
            "stay": lambda: pool.arrival.max() - pool.arrival >= self.stay * size,
            "duplicates": lambda: duplicates(pool.images, self.tolerance),
            "quarantine": quarantined,
            **{name: partial(lies, pool.images) for name, lies in LIES.items()},
        }
        why = torch.full((len(pool),), -1, device=pool.age.device)
        for number, guard in enumerate(GUARDS):
            if guard in self.guards:
                started = perf_counter()
                why[hides[guard]()] = number
                self.seconds[guard] += perf_counter() - started
        return why, look

    def _quarantined(self, pool: Pool, look: Tensor) -> Tensor:
        """Which images look as the suspects do and the stream does not: among the nearest looks of both."""
        self._stream.add(look[((pool.age == 0) & (pool.arrival % STREAM_EVERY == 0)).cpu()])
        n_suspects, n_stream = len(self._suspects), len(self._stream)
        if min(n_suspects, n_stream) < N_NEAREST:
            return torch.zeros_like(pool.age, dtype=torch.bool)
        known = torch.cat([self._suspects.looks, self._stream.looks])
        scale = self._stream.looks.std(0).clamp_(min=1e-6)
        nearest = torch.cdist(look / scale, known / scale).topk(N_NEAREST, largest=False).indices
        n_near = (nearest < n_suspects).sum(1)
        return (n_near / n_suspects > self.over * (N_NEAREST - n_near) / n_stream).to(pool.age.device)

    def _note(self, pool: Pool, keep: Tensor, look: Tensor) -> None:
        """The suspects among the images that stay: trained on for long enough, scored again, and above what it was."""
        score, age, arrival = (column[keep].tolist() for column in (pool.score, pool.age, pool.arrival))
        self._entered = {n: self._entered.get(n, s) for n, s in zip(arrival, score, strict=True)}
        suspects = []
        for row, (n, s, steps) in enumerate(zip(arrival, score, age, strict=True)):
            if steps >= self.patience and s > self._entered[n]:
                suspects.append(row)
                self._entered[n] = math.inf
        self._suspects.add(look[keep.cpu()][suspects])

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict() if hasattr(self.policy, "state_dict") else {},
            "kept_out": dict(self.kept_out),
            "arrival": torch.tensor(list(self._entered), dtype=torch.long),
            "entered": torch.tensor(list(self._entered.values()), dtype=torch.float64),
            "suspects": self._suspects.state_dict(),
            "stream": self._stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.policy, "load_state_dict"):
            self.policy.load_state_dict(state["policy"])
        self.kept_out = Counter(state["kept_out"])
        self._entered = dict(zip(state["arrival"].tolist(), state["entered"].tolist(), strict=True))
        self._suspects.load_state_dict(state["suspects"])
        self._stream.load_state_dict(state["stream"])


N_NEAREST = 64  # looks that decide about an image
N_SUSPECTS, N_STREAM = 1024, 4096  # looks that are remembered
STREAM_EVERY = 3  # images of the stream for each look of it that is remembered
MOST_REPEATED = 0.25  # of the rows or columns
LEAST_CONTRAST = 3.0  # of 255; in CIFAR-10 none is below 6
LEAST_CORRELATION = 0.3  # of neighbouring pixels; in CIFAR-10 none is below 0.55, and noise has up to 0.1


def parse_guards(guards: str) -> tuple[str, ...]:
    """The guards in `on` or in a list with commas, in their own order."""
    names = list(GUARDS) if guards == "on" else [name.strip() for name in guards.split(",")]
    for name in names:
        if name not in GUARDS:
            raise UserError(f"no guard {name!r}: {one_of(name, ('on', *GUARDS))}")
    return tuple(name for name in GUARDS if name in names)


class Memory:
    """The last few looks, in a ring."""

    def __init__(self, size: int):
        self.size, self.n_added = size, 0
        self.looks = torch.empty(0, N_LOOKS)

    def __len__(self) -> int:
        return len(self.looks)

    def add(self, looks: Tensor) -> None:
        looks = looks[-self.size :].to(self.looks)
        n_room = min(len(looks), self.size - len(self.looks))
        self.looks = torch.cat([self.looks, looks[:n_room]])
        places = (self.n_added + torch.arange(len(looks)))[n_room:] % self.size
        self.looks[places] = looks[n_room:]
        self.n_added += len(looks)

    def state_dict(self) -> dict[str, Any]:
        return {"looks": self.looks.clone(), "n_added": self.n_added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.looks, self.n_added = state["looks"].clone(), state["n_added"]


def duplicates(images: Tensor, tolerance: float) -> Tensor:
    """Which images look like an earlier one: mean difference of the pixels, of 255, up to the tolerance."""
    small = means(images, 2).flatten(1)  # these differ by no more than the images do
    every = max(1, images[0].numel() // 192)
    sample = images.flatten(1)[:, ::every].float()  # some of the pixels: their difference is about that of all
    hidden = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    for start in range(0, len(images), 512):  # some rows of the matrix of all pairs at a time
        rows = slice(start, start + 512)
        near = (torch.cdist(small[rows], small, p=1.0) / small.shape[1] <= tolerance + 0.01).triu(1 + start)
        if int(near.sum()) > len(images):  # a camera at rest: nearly all are, and the sensor's noise tells them apart
            near &= torch.cdist(sample[rows], sample, p=1.0) / sample.shape[1] <= tolerance + 0.5
        for first in (start + near.any(1).nonzero()[:, 0]).tolist():  # nowhere in an ordinary dataset
            if not hidden[first]:
                later = (near[first - start] & ~hidden).nonzero()[:, 0]
                own = images[first].short()
                for part in later.split(max(1, 2**20 // own.numel())):
                    difference = (images[part].short() - own).abs_().flatten(1).float().mean(1)
                    hidden[part[difference <= tolerance]] = True
    return hidden


def means(images: Tensor, n: int) -> Tensor:
    """Each image in n x n means of its pixels, of 255."""
    n_rows, n_columns = images.shape[2:]
    return by_few(images, lambda x: F.adaptive_avg_pool2d(x, (min(n, n_rows), min(n, n_columns))))


def by_few(images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of images as floats, of few at a time for the sake of memory."""
    few = max(1, 2**18 // images.shape[1:].numel())
    return torch.cat([function(part.float()) for part in images.split(few)])


def contrast(images: Tensor) -> Tensor:
    """The standard deviation of 8 x 8 means: of a black frame the sensor's noise leaves little."""
    return means(images, 8).std((2, 3), correction=0).amax(1)


def neighbour_correlation(images: Tensor) -> Tensor:
    """Of the brightness of neighbouring pixels, across or down, whichever is larger."""

    def correlation(x: Tensor) -> Tensor:
        grey = x.mean(1)
        grey = grey - grey.mean((1, 2), keepdim=True)
        variance = grey.square().mean((1, 2)) + 1e-6
        across = (grey[:, :, 1:] * grey[:, :, :-1]).mean((1, 2))
        down = (grey[:, 1:] * grey[:, :-1]).mean((1, 2))
        return torch.maximum(across, down) / variance

    return by_few(images, correlation)


def repeated(images: Tensor) -> Tensor:
    """The share of rows, or of columns, that are not of one colour and yet the same as the one before."""

    def share(x: Tensor) -> Tensor:
        same = x.diff(dim=2).abs().amax((1, 3)) <= 1  # n x (H - 1)
        lively = (x.amax(3) - x.amin(3)).amax(1)[:, 1:] > 32
        return (same & lively).float().mean(1)

    return by_few(images, lambda x: torch.maximum(share(x), share(x.transpose(2, 3))))


# What a single frame shows by itself, of no use to a person either.
LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "smear": lambda images: repeated(images) >= MOST_REPEATED,
    "noise": lambda images: neighbour_correlation(images) < LEAST_CORRELATION,
    "blank": lambda images: contrast(images) < LEAST_CONTRAST,
}


def unusable(images: Tensor) -> Tensor:
    """Which of the images lie by themselves."""
    return torch.stack([lies(images) for lies in LIES.values()]).any(0)


def looks(images: Tensor) -> Tensor:
    """How images look in N_LOOKS numbers that no training changes: colours, and contrast by scale and direction."""

    def look(x: Tensor) -> Tensor:
        level = x.mean((2, 3))
        parts = [level / 32, (x.square().mean((2, 3)) - level.square()).clamp_(min=0).sqrt().log1p()]
        grey = x.mean(1)
        for _ in range(3):
            for across in (grey.diff(dim=1), grey.diff(dim=2)):
                sizes = across.abs().mean((1, 2)), across.square().mean((1, 2)).sqrt()
                parts.append(torch.stack(sizes, 1).log1p())
            grey = F.avg_pool2d(grey, 2, ceil_mode=True)
        return torch.cat(parts, 1)

    return by_few(images, look)


N_LOOKS = 18
