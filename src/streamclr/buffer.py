"""The buffer B and the pool B ∪ I from which a policy chooses the next B."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.options import parse_size


@dataclass
class Pool:
    """What a policy sees: the images of the buffer, then those of the new segment. It may write the scores.

    >>> import torch
    >>> from streamclr import Buffer, Pool
    >>> pool: Pool = Buffer(4).pool(torch.zeros(6, 3, 16, 16, dtype=torch.uint8))
    >>> pool
    Pool(6 images, 0 of them in the buffer)
    >>> pool.arrival
    tensor([0, 1, 2, 3, 4, 5])
    """

    images: Tensor  # n x 3 x H x W, uint8
    score: Tensor  # float, written by the policy; NaN for a new image
    age: Tensor  # steps since the image was placed in the buffer; 0 for a new image
    arrival: Tensor  # number of the image in the stream
    n_buffer: int = 0  # how many of them are in the buffer
    n_rescored: int = 0  # how many of those got a new score

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Pool({len(self)} images, {self.n_buffer} of them in the buffer)"

    def rescore(self, due: Tensor, score: Tensor) -> None:
        """Write the scores of the images in the mask `due`."""
        self.score[due] = score
        self.n_rescored += int(due[: self.n_buffer].sum())


def checked_keep(keep: Any, pool: Pool, size: int) -> Tensor:
    """What a policy returned, if it is `size` different indices of the pool."""
    due = f"return {size} different indices of the pool"
    try:
        keep = torch.as_tensor(keep, device=pool.age.device)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"the policy returned a {type(keep).__name__}: {due}") from None
    if keep.ndim != 1 or keep.dtype not in (torch.int64, torch.int32):
        raise UserError(f"the policy returned {keep.dtype} of shape {tuple(keep.shape)}: {due}, torch.int64")
    if len(keep) and not (int(keep.min()) >= 0 and int(keep.max()) < len(pool)):
        wrong = int(keep.min()) if int(keep.min()) < 0 else int(keep.max())
        raise UserError(f"the policy returned index {wrong}, the pool has {len(pool)} images: {due}")
    if len(keep) != size or len(keep.unique()) != size:
        raise UserError(f"the policy returned {len(keep)} indices, {len(keep.unique())} of them different: {due}")
    return keep.long()


COLUMNS = ("images", "scores", "ages", "arrivals")


def n_that_fit(size: int | str, shape: Sequence[int], neighbours: bool, n_more: int = 0) -> int:
    """How many images of this shape a buffer holds.

    size: in bytes, as "10M"; or the number itself.
    neighbours: whether a neighbouring frame is kept beside each image.
    n_more: bytes of what else is kept of it.
    """
    n_bytes = math.prod(shape) * (1 + neighbours) + n_more
    n = size if isinstance(size, int) else parse_size(size, "buffer") // n_bytes
    if n < 2:
        holds = "" if isinstance(size, int) else f", {n} images of {shape[-1]} px"
        raise UserError(f"buffer is {size}{holds}: use at least 2 images, one needs another to contrast with")
    return n


class Buffer:
    """Images, scores, ages and arrival numbers in tensors that are allocated once, with room for one more segment.

    neighbours: keep a neighbouring frame beside each image.
    kept: shape of what else is kept of each image, in half precision (see kept.py).

    >>> import torch
    >>> from streamclr import Buffer
    >>> buffer = Buffer(4)
    >>> pool = buffer.pool(torch.zeros(6, 3, 16, 16, dtype=torch.uint8))
    >>> buffer.replace(pool, keep=torch.tensor([0, 2, 3, 5]))  # so many of them were in it before
    0
    >>> buffer
    Buffer(4 of 4, 3 x 16 x 16)
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        neighbours: bool = False,
        kept: tuple[int, ...] | None = None,
    ):
        self.size, self.device = n_that_fit(size, (), neighbours), torch.device(device)
        self.n_seen = 0  # images offered so far
        self._n = self._end = 0  # images in the buffer; those from _n to _end the last step did not keep
        self._names = (*COLUMNS, *(["neighbours"] if neighbours else []), *(["kept"] if kept else []))
        self._kept_shape = kept
        self._allocate(size, (3, 0, 0))

    def _allocate(self, rows: int, shape: tuple[int, ...]) -> None:
        try:
            self._images = torch.empty(rows, *shape, dtype=torch.uint8, device=self.device)
            self._neighbours = torch.empty_like(self._images) if self.has_neighbours else None
            n_kept = rows if shape[-1] else 0  # none before the first segment
            kept = None if self._kept_shape is None else (n_kept, *self._kept_shape)
            self._kept = None if kept is None else torch.zeros(kept, dtype=torch.half, device=self.device)
        except RuntimeError:
            raise UserError(f"no memory for {rows} images of {shape}: use a smaller buffer or smaller images") from None
        self._scores = torch.full((rows,), torch.nan, device=self.device)
        self._ages = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._arrivals = torch.zeros(rows, dtype=torch.long, device=self.device)

    @property
    def has_neighbours(self) -> bool:
        return "neighbours" in self._names

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        further = [column for column in (self._neighbours, self._kept) if column is not None]
        return self._images, self._scores, self._ages, self._arrivals, *further

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images.shape[1:])) if self._n else "no images yet"
        return f"Buffer({self._n} of {self.size}, {shape})"

    @property
    def images(self) -> Tensor:
        return self._images[: self._n]

    @property
    def scores(self) -> Tensor:
        return self._scores[: self._n]

    @property
    def ages(self) -> Tensor:
        return self._ages[: self._n]

    @property
    def arrivals(self) -> Tensor:
        return self._arrivals[: self._n]

    @property
    def kept(self) -> Tensor:
        """n x what else is kept of each image."""
        assert self._kept is not None
        return self._kept[: self._n]

    def pool(self, segment: Tensor, neighbours: Tensor | None = None) -> Pool:
        """The pool of the buffer and a new segment; every image of the buffer is one step older.

        neighbours: a neighbouring frame of each image of the segment, where the buffer keeps them.
        """
        shape = tuple(segment.shape[1:])
        if self._n and shape != tuple(self._images.shape[1:]):
            raise UserError(
                f"the segment's images are {shape}, those in the buffer {tuple(self._images.shape[1:])}: "
                "give the stream one size, for instance with size="
            )
        self._before = (self._n, self.scores.clone())
        self._end = self._n
        self._movers = self._holes = torch.empty(0, dtype=torch.long, device=self.device)
        end = self._n + len(segment)
        if end > len(self._images) or shape != tuple(self._images.shape[1:]):
            filled = [column[: self._n] for column in self._columns]
            self._allocate(self.size + len(segment), shape)
            if self._n:
                for column, values in zip(self._columns, filled, strict=True):
                    column[: self._n] = values
        new = slice(self._n, end)
        self._images[new] = segment
        if self._neighbours is not None:
            self._neighbours[new] = segment if neighbours is None else neighbours
        self._scores[new] = torch.nan
        self._ages[: self._n] += 1
        self._ages[new] = 0
        self._arrivals[new] = torch.arange(self.n_seen, self.n_seen + len(segment), device=self.device)
        self.n_seen += len(segment)
        images, scores, ages, arrivals = (column[:end] for column in self._columns[: len(COLUMNS)])
        return Pool(images, scores, ages, arrivals, n_buffer=self._n)

    def replace(self, pool: Pool, keep: Tensor) -> int:
        """Make the images `keep` of the pool the new buffer; returns how many were in it before."""
        size = min(self.size, len(pool))
        chosen = torch.zeros(len(pool), dtype=torch.bool, device=self.device)
        chosen[checked_keep(keep, pool, size)] = True
        n_kept = int(chosen[: self._n].sum())
        self._holes, self._movers = (~chosen[:size]).nonzero()[:, 0], chosen[size:].nonzero()[:, 0] + size
        self._swap()
        self._n, self._end = size, len(pool)
        return n_kept

    def _swap(self) -> None:
        for column in self._columns:
            column[self._holes], column[self._movers] = column[self._movers], column[self._holes]

    def left(self) -> dict[str, Tensor]:
        """The images that the last step removed from the buffer, with their last scores."""
        behind = {name: column[self._n : self._end] for name, column in zip(self._names, self._columns, strict=True)}
        return {name: column[behind["ages"] > 0] for name, column in behind.items()}

    def undo(self) -> None:
        """Take the last step back; the images of its segment still count as seen."""
        self._swap()
        self._n, scores = self._before
        self._end = self._n
        self.scores.copy_(scores)
        self._ages[: self._n] -= 1

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """The rows of `n` different images, uniformly; all of them, in order, if there are no more."""
        if n >= self._n:
            return torch.arange(self._n, device=self.device)
        return torch.randperm(self._n, generator=generator, device=self.device)[:n]

    def pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images and their neighbours; where no neighbours are kept, an image is its own."""
        if len(rows) == self._n:  # all of them, in place; their order does not matter
            rows = slice(None)  # type: ignore[assignment]
        images = self.images[rows]
        return images, images if self._neighbours is None else self._neighbours[: self._n][rows]

    def state_dict(self, copy: bool = True) -> dict[str, Tensor | int]:
        columns = {name: column[: self._n] for name, column in zip(self._names, self._columns, strict=True)}
        return {**{name: t.clone() if copy else t for name, t in columns.items()}, "n_seen": self.n_seen}

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        if missing := [name for name in (*self._names, "n_seen") if name not in state]:
            raise UserError(f"the saved buffer has no {', '.join(missing)}: use the state of a learner like this one")
        columns = [state[name] for name in self._names]
        assert isinstance(columns[0], Tensor)
        if (n := len(columns[0])) > self.size:
            raise UserError(f"the saved buffer holds {n} images, this one {self.size}: use buffer={n}")
        self._n, self._end, self.n_seen = n, n, int(state["n_seen"])
        self._allocate(2 * self.size, tuple(columns[0].shape[1:]))
        for column, values in zip(self._columns, columns, strict=True):
            column[: self._n] = values
