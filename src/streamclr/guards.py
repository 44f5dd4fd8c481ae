"""Filters for unusable frames (noise, smears, black, frozen), with which a policy would fill the buffer."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.options import one_of
from streamclr.buffer import Buffer, Pool, checked_keep
from streamclr.policy import Policy, draw_batch, load_policy_state, policy_state

# From the mildest to the worst: if too few images are left, hidden ones come back in this order.
GUARDS = ("stay", "duplicates", "quarantine", "smear", "noise", "blank")


class Guarded:
    """Hides unusable frames from a policy, which chooses among the others.

    guards: `on` (all of them), or some of these with commas between.

    - `duplicates`: of equal images only the first counts (mean difference of the pixels, of 255, up to `tolerance`).
    - `blank`: black and covered frames, which have no contrast except the sensor's noise.
    - `noise`: frames whose neighbouring pixels are not correlated.
    - `smear`: frames in which a quarter of the rows or columns repeat the one before.
    - `stay`: an image leaves after `stay` x (buffer size) newer images have arrived.
    - `quarantine`: images that look like those whose score did not fall in `patience` steps of training, if such images
      are `over` times as frequent among these as in the stream.

    >>> import torch
    >>> from streamclr import Guarded, Learner, Reservoir, resnet18
    >>> policy = Guarded(Reservoir(), guards="blank")
    >>> learner = Learner(resnet18(width=4), policy, buffer=4)
    >>> images = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    >>> images[2] = 0  # the camera is covered
    >>> step = learner.learn_many(images)
    >>> policy.hidden, 2 in learner.buffer.arrivals
    ({2: 'blank'}, False)
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
        self.kept_out: Counter[str] = Counter()  # number of hidden images, by guard
        self.hidden: dict[int, str] = {}  # arrival number: the guard that hid it in the last step
        self._seen = {guard: Remembered(look) for guard, look in LOOKS.items() if guard in self.guards}
        self._distinct = torch.empty(0, dtype=torch.long)  # arrival numbers of the last pool without its duplicates
        self._entered: dict[int, float] = {}  # arrival number: first score; inf once it is a suspect
        self._suspects = self._stream = torch.empty(0, N_APPEARANCE)  # appearances, the oldest first

    def __repr__(self) -> str:
        return f"Guarded({self.policy!r}, {','.join(self.guards)})"

    def keep(self, pool: Pool, size: int, model: nn.Module) -> Tensor:
        guard, looks = self._hide(pool, size)
        seen = guard < 0
        if int(seen.sum()) < size:  # too few: the mildest cases come back
            seen[guard.argsort(stable=True)[:size]] = True
        arrivals, worst = pool.arrival[~seen].tolist(), guard[~seen].tolist()
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
        if looks is not None:
            self._note_suspects(pool, keep, looks)
        return keep

    def draw(self, buffer: Buffer, n: int, model: nn.Module, generator: torch.Generator) -> Tensor:
        return draw_batch(self.policy, buffer, n, model, generator)

    def _hide(self, pool: Pool, size: int) -> tuple[Tensor, Tensor | None]:
        """For each image the index of the worst guard that hides it, or -1; and the appearances, if computed."""
        seen = {guard: remembered.of(pool) for guard, remembered in self._seen.items()}
        hides: dict[str, Callable[[], Tensor]] = {
            "stay": lambda: pool.arrival.max() - pool.arrival >= self.stay * size,
            "duplicates": lambda: self._duplicates(pool, seen["duplicates"]),
            "quarantine": lambda: self._quarantined(pool, seen["quarantine"]),
        }
        worst = torch.full((len(pool),), -1, device=pool.age.device)
        for number, guard in enumerate(GUARDS):
            if guard in self.guards:
                hidden = hides[guard]() if guard in hides else seen[guard]
                worst[hidden.to(worst.device)] = number
        return worst, seen.get("quarantine")

    def _duplicates(self, pool: Pool, small: Tensor) -> Tensor:
        """Images that were in the last pool were compared then."""
        known = torch.isin(pool.arrival.cpu(), self._distinct) & (pool.age.cpu() > 0)
        hidden = duplicates(pool.images, self.tolerance, known, small)
        self._distinct = pool.arrival[~hidden].cpu()
        return hidden

    def _quarantined(self, pool: Pool, looks: Tensor) -> Tensor:
        """Which images look like suspects and unlike the stream, by their nearest neighbours among both."""
        new = looks[((pool.age == 0) & (pool.arrival % STREAM_EVERY == 0)).cpu()]
        self._stream = torch.cat([self._stream, new])[-N_STREAM:]
        n_suspects, n_stream = len(self._suspects), len(self._stream)
        if min(n_suspects, n_stream) < N_NEAREST:
            return torch.zeros_like(pool.age, dtype=torch.bool)
        known = torch.cat([self._suspects, self._stream])
        scale = self._stream.std(0).clamp_(min=1e-6)
        n_near = torch.cat(
            [
                (torch.cdist(part, known / scale).topk(N_NEAREST, largest=False).indices < n_suspects).sum(1)
                for part in (looks / scale).split(ROWS_AT_ONCE)
            ]
        )
        return (n_near / n_suspects > self.over * (N_NEAREST - n_near) / n_stream).to(pool.age.device)

    def _note_suspects(self, pool: Pool, keep: Tensor, looks: Tensor) -> None:
        """Remember kept images that were trained on for `patience` steps and yet score above their first score."""
        score, age, arrival = (column[keep].tolist() for column in (pool.score, pool.age, pool.arrival))
        self._entered = {n: self._entered.get(n, s) for n, s in zip(arrival, score, strict=True)}
        suspects = []
        for row, (n, s, steps) in enumerate(zip(arrival, score, age, strict=True)):
            if steps >= self.patience and s > self._entered[n]:
                suspects.append(row)
                self._entered[n] = math.inf
        self._suspects = torch.cat([self._suspects, looks[keep.cpu()][suspects]])[-N_SUSPECTS:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": policy_state(self.policy),
            "kept_out": dict(self.kept_out),
            "arrival": torch.tensor(list(self._entered), dtype=torch.long),
            "entered": torch.tensor(list(self._entered.values()), dtype=torch.float64),
            "suspects": {"looks": self._suspects, "n_added": len(self._suspects)},
            "stream": {"looks": self._stream, "n_added": len(self._stream)},
            "distinct": self._distinct,
            "seen": {guard: remembered.state_dict() for guard, remembered in self._seen.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_policy_state(self.policy, state["policy"])
        self.kept_out = Counter(state["kept_out"])
        self._entered = dict(zip(state["arrival"].tolist(), state["entered"].tolist(), strict=True))
        # A state of an older version has a ring, which begins at its row n_added.
        self._suspects, self._stream = (
            ring["looks"].roll(-ring["n_added"], 0) for ring in (state["suspects"], state["stream"])
        )
        if "seen" in state:  # else it is of an older version: what is not remembered is looked at again
            self._distinct = state["distinct"]
            for guard, remembered in self._seen.items():
                remembered.load_state_dict(state["seen"][guard])


class Remembered:
    """Numbers of each image that depend on its pixels alone: they are computed once, when the image comes."""

    def __init__(self, look: Callable[[Tensor], Tensor]):
        self._look = look
        self._arrivals, self._found = torch.empty(0, dtype=torch.long), torch.empty(0)  # of the last pool

    def of(self, pool: Pool) -> Tensor:
        """One row for each image of the pool, on the CPU."""
        arrivals = pool.arrival.cpu().clone()  # the buffer moves its rows
        known = torch.isin(arrivals, self._arrivals) & (pool.age.cpu() > 0)
        new = self._look(pool.images[(~known).to(pool.images.device)]).cpu()
        found = new.new_empty(len(pool), *new.shape[1:])
        found[~known] = new
        if bool(known.any()):
            order = self._arrivals.argsort()
            found[known] = self._found[order[torch.searchsorted(self._arrivals[order], arrivals[known])]]
        self._arrivals, self._found = arrivals, found
        return found

    def state_dict(self) -> dict[str, Tensor]:
        return {"arrivals": self._arrivals, "found": self._found}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._arrivals, self._found = state["arrivals"], state["found"]


N_NEAREST = 64  # neighbours that decide about an image
N_SUSPECTS, N_STREAM = 1024, 4096  # appearances remembered
ROWS_AT_ONCE = 512  # of a matrix of distances, to save memory
STREAM_EVERY = 3  # every third image of the stream is remembered
MIN_SMEARED_SHARE = 0.25  # of the rows or columns
MIN_COARSE_STD = 3.0  # of 255; in CIFAR-10 none is below 6
MIN_NEIGHBOUR_CORRELATION = 0.3  # in CIFAR-10 none is below 0.55; noise has up to 0.1


def parse_guards(guards: str) -> tuple[str, ...]:
    """The guards in `on` or in a list with commas, in the order of GUARDS."""
    names = list(GUARDS) if guards == "on" else [name.strip() for name in guards.split(",")]
    for name in names:
        if name not in GUARDS:
            raise UserError(f"no guard {name!r}: {one_of(name, ('on', *GUARDS))}")
    return tuple(name for name in GUARDS if name in names)


def duplicates(images: Tensor, tolerance: float, known: Tensor | None = None, small: Tensor | None = None) -> Tensor:
    """Which images equal an earlier one: mean difference of the pixels, of 255, up to the tolerance.

    known: a mask of images that are known to differ from each other; they count as earlier than the others.
    small: `small_means` of the images, if somebody has them.
    """
    small = (small_means(images) if small is None else small).to(images.device)
    is_known = torch.zeros(len(images), dtype=torch.bool) if known is None else known.cpu()
    order = is_known.logical_not().long().argsort(stable=True).to(images.device)
    n_known = int(is_known.sum())
    later = order[n_known:]  # the rows that may be hidden
    pixels, every = images.flatten(1), max(1, images[0].numel() // 192)
    hidden = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    for start, rows in zip(range(0, len(images), ROWS_AT_ONCE), order.split(ROWS_AT_ONCE), strict=True):
        # The means are a lower bound: they differ by no more than the images.
        near = torch.cdist(small[rows], small[later], p=1.0) / small.shape[1] <= tolerance + 0.01
        near = near.triu(1 + start - n_known)
        if int(near.sum()) > len(images):  # a camera at rest: the means are too coarse, some pixels are an estimate
            sample, of_later = (pixels[some, ::every].float() for some in (rows, later))
            near &= torch.cdist(sample, of_later, p=1.0) / sample.shape[1] <= tolerance + 0.5
        for place in near.any(1).nonzero()[:, 0].tolist():  # rare in a dataset
            first = rows[place]
            if not hidden[first]:
                own = images[first].short()
                like = later[near[place]]
                for part in like[~hidden[like]].split(max(1, 2**20 // own.numel())):
                    difference = (images[part].short() - own).abs_().flatten(1).float().mean(1)
                    hidden[part[difference <= tolerance]] = True
    return hidden


def small_means(images: Tensor) -> Tensor:
    """2 x 2 means of each image's pixels, in a row."""
    return means(images, 2).flatten(1)


def means(images: Tensor, n: int) -> Tensor:
    """n x n means of each image's pixels, of 255."""
    n_rows, n_columns = images.shape[2:]
    return in_chunks(images, lambda x: F.adaptive_avg_pool2d(x, (min(n, n_rows), min(n, n_columns))))


def in_chunks(images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of the images as floats, in chunks to save memory."""
    few = max(1, 2**18 // images.shape[1:].numel())
    return torch.cat([function(part.float()) for part in images.split(few)])


def coarse_std(images: Tensor) -> Tensor:
    """Standard deviation of 8 x 8 means, of 255; near 0 for a black frame, because the sensor's noise averages out."""
    return means(images, 8).std((2, 3), correction=0).amax(1)


def neighbour_correlation(images: Tensor) -> Tensor:
    """Correlation of the brightness of neighbouring pixels, across or down, the larger of both."""

    def correlation(x: Tensor) -> Tensor:
        grey = x.mean(1)
        grey = grey - grey.mean((1, 2), keepdim=True)
        variance = grey.square().mean((1, 2)) + 1e-6
        across = (grey[:, :, 1:] * grey[:, :, :-1]).mean((1, 2))
        down = (grey[:, 1:] * grey[:, :-1]).mean((1, 2))
        return torch.maximum(across, down) / variance

    return in_chunks(images, correlation)


def smeared_share(images: Tensor) -> Tensor:
    """Share of rows, or of columns, that repeat the one before, not counting those of a single colour."""

    def share(x: Tensor) -> Tensor:
        same = x.diff(dim=2).abs().amax((1, 3)) <= 1  # n x (H - 1)
        varied = (x.amax(3) - x.amin(3)).amax(1)[:, 1:] > 32
        return (same & varied).float().mean(1)

    return in_chunks(images, lambda x: torch.maximum(share(x), share(x.transpose(2, 3))))


# The guards that judge a frame by itself.
FRAME_CHECKS: dict[str, Callable[[Tensor], Tensor]] = {
    "smear": lambda images: smeared_share(images) >= MIN_SMEARED_SHARE,
    "noise": lambda images: neighbour_correlation(images) < MIN_NEIGHBOUR_CORRELATION,
    "blank": lambda images: coarse_std(images) < MIN_COARSE_STD,
}


def unusable(images: Tensor) -> Tensor:
    """Which images are smears, noise or blank."""
    return torch.stack([check(images) for check in FRAME_CHECKS.values()]).any(0)


def appearance(images: Tensor) -> Tensor:
    """N_APPEARANCE numbers per image, independent of the encoder: colours, and gradients by scale and direction."""

    def describe(x: Tensor) -> Tensor:
        level = x.mean((2, 3))
        parts = [level / 32, (x.square().mean((2, 3)) - level.square()).clamp_(min=0).sqrt().log1p()]
        grey = x.mean(1)
        for _ in range(3):
            for across in (grey.diff(dim=1), grey.diff(dim=2)):
                sizes = across.abs().mean((1, 2)), across.square().mean((1, 2)).sqrt()
                parts.append(torch.stack(sizes, 1).log1p())
            grey = F.avg_pool2d(grey, 2, ceil_mode=True)
        return torch.cat(parts, 1)

    return in_chunks(images, describe)


N_APPEARANCE = 18

# What each guard needs to know of an image's pixels.
LOOKS: dict[str, Callable[[Tensor], Tensor]] = {"duplicates": small_means, "quarantine": appearance, **FRAME_CHECKS}
