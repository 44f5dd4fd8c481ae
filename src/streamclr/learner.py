"""The method. Read `Learner.learn_many` first: everything else in this package is a noun that it calls."""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamclr.base.errors import NotFinite, UserError
from streamclr.base.tensors import load_weights
from streamclr.buffer import Buffer
from streamclr.compute.adam import Adam
from streamclr.compute.chunked import backward, check_can_chunk
from streamclr.compute.memory import MemoryPlan, make_plan, parse_size
from streamclr.compute.ranks import Alone
from streamclr.encoders.inference import seeded
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import resnet18
from streamclr.loss import nt_xent
from streamclr.policy import ContrastScoring, Policy
from streamclr.score import contrast_score
from streamclr.views import StrongViews


@dataclass(frozen=True)
class Step:
    """What one call of `learn_many` did."""

    number: int  # of the step, from 1
    seen: int  # images of the stream so far
    loss: float  # NT-Xent, the mean over the step's updates
    kept: int  # images of the buffer that stayed
    replaced: int  # images of the segment that entered
    rescored: float  # share of the buffer that was scored again
    score: float  # mean score in the new buffer; NaN for a policy that does not score
    seconds_scoring: float
    seconds_training: float
    spread: float = math.nan  # of the batch's projections, 1 - |mean z|²: 0 if all are alike, about 1 if all differ

    def __str__(self) -> str:
        return (
            f"step {self.number} | loss {self.loss:.3f} | {self.replaced} of {self.kept + self.replaced} replaced | "
            f"{100 * self.rescored:.1f} % re-scored"
        )


class Learner:
    """Learns an encoder from segments of an unlabelled stream, with a small buffer of the images that teach the most.

    encoder: any module that maps images to features, or a ContrastiveModel, which has its projection head with it; a
        ResNet-18 with the small stem unless given.
    policy: which images stay in the buffer; contrast scoring unless given.
    buffer_size: N, images in the buffer.
    batch_size: images of one update, drawn uniformly from the buffer; the whole buffer unless given.
    memory: what the whole process may take, as "600M" or "1.5G"; the views then go through the model in chunks, with
        the same result. Predicted at the first segment, and refused there if it cannot be.
    compile: let torch compile the model: narrow encoders gain a third, after a minute and with a C++ compiler.
    seed: of the initial weights, the views and the draws.
    device: where the model and the buffer live; a GPU if there is one.
    """

    def __init__(
        self,
        encoder: nn.Module | None = None,
        policy: Policy | None = None,
        buffer_size: int = 256,
        batch_size: int | None = None,
        updates_per_segment: int = 1,
        temperature: float = 0.5,
        lr: float = 1e-4,
        weight_decay: float = 1e-4,
        views: StrongViews | None = None,
        memory: str | int | None = None,
        compile: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        self.device = find_device(device)
        self.ranks = Alone()
        self.policy = ContrastScoring() if policy is None else policy
        self.buffer = Buffer(buffer_size, self.device)
        self.batch_size = buffer_size if batch_size is None else batch_size
        for name, value, least in (("batch_size", self.batch_size, 2), ("updates_per_segment", updates_per_segment, 1)):
            if value < least:
                raise UserError(f"{name} is {value}: use at least {least}")
        if self.batch_size > buffer_size:
            raise UserError(
                f"batch_size is {batch_size}, more than buffer_size ({buffer_size}): a batch is drawn from it"
            )
        if not (temperature > 0 and lr > 0 and weight_decay >= 0):
            raise UserError(
                f"temperature ({temperature}) and lr ({lr}) must be above 0, weight_decay ({weight_decay}) not below"
            )
        self.updates_per_segment, self.temperature = updates_per_segment, temperature
        self.views = StrongViews() if views is None else views
        with seeded(seed):
            encoder = resnet18() if encoder is None else encoder
            model = encoder if isinstance(encoder, ContrastiveModel) else ContrastiveModel(encoder)
        self.model = model.to(self.device)
        self.optimizer = Adam(self.model.parameters(), lr, weight_decay)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.n_steps = 0
        self.memory = None if memory is None else parse_size(memory)
        self.plan: MemoryPlan | None = None  # how to keep within the memory, once the images' size is known
        if self.memory is not None:
            if compile:
                raise UserError("both memory and compile are given: a compiled model takes the whole batch at once")
            if self.device.type != "cpu":
                raise UserError(f"memory is for the CPU, the device is {self.device}: use a smaller batch_size")
            check_can_chunk(self.model)
        if compile and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
            raise UserError("compile is given, and there is no C++ compiler: install g++, or leave compile out")
        self._trained: nn.Module = torch.compile(self.model) if compile else self.model  # type: ignore[assignment]

    @property
    def encoder(self) -> nn.Module:
        return self.model.encoder

    # ------------------------------------------------------------------------------------------------------------
    # The method (Sec. III): replace once, update.

    def learn_many(self, images: Tensor | np.ndarray) -> Step:
        """Learn from one segment I of the stream: uint8 images, n x 3 x H x W, n as you like."""
        images = checked_images(images, "the segment")
        if self.memory is not None:
            self.fit(images.shape)
        started = perf_counter()
        n_before = len(self.buffer)
        pool = self.buffer.pool(images)  # B ∪ I
        with self._undone_if_not_finite():
            with self.ranks.together():
                keep = self.policy.keep(pool, min(self.buffer.size, len(pool)), self.model)  # topN, Eq. 3
                n_kept = self.buffer.replace(pool, keep)  # the new B
            scored = perf_counter()
            losses, spreads = zip(*(self._update() for _ in range(self.updates_per_segment)), strict=True)
            trained = perf_counter()
        self.n_steps += 1
        return Step(
            number=self.n_steps,
            seen=self.buffer.n_seen,
            loss=sum(losses) / len(losses),
            kept=n_kept,
            replaced=len(self.buffer) - n_kept,
            rescored=pool.n_rescored / max(1, n_before),
            score=float(self.buffer.scores.mean()),
            seconds_scoring=scored - started,
            seconds_training=trained - scored,
            spread=spreads[-1],
        )

    def _update(self) -> tuple[float, float]:
        """One SimCLR update on a batch; both views in one pass, so that BatchNorm cannot tell them apart.

        Returns the loss and the spread of the projections.
        """
        batch = self.buffer.draw(self.batch_size, self.generator)
        n = 2 * len(batch)
        most, least = self.ranks.largest(n // 2, -n // 2)
        if most != -least:
            raise UserError(f"the ranks have batches of {-least:.0f} to {most:.0f} images: give all the same")
        draw = self.views.draw((n, *batch.shape[1:]), self.generator)
        image = torch.arange(n, device=self.device) % len(batch)
        spread = math.nan

        def views(rows: slice) -> Tensor:
            return self.views.apply(batch[image[rows]], draw.rows(rows))

        def loss(z: Tensor) -> Tensor:
            nonlocal spread
            z0, z1 = (self.ranks.gather(half) for half in z.chunk(2))
            spread = 1 - float(torch.cat([z0, z1]).detach().mean(0).square().sum())
            return nt_xent(z0, z1, self.temperature)

        self.model.train()
        self.optimizer.zero_grad()
        with self.ranks.together():
            value = backward(self._trained, views, n, loss, self.plan.chunk_size if self.plan else None)
            self._check(value)
        self.optimizer.step()
        self.ranks.settle(self.model)
        return value, spread

    def _check(self, loss: float) -> None:
        """Before anything is changed for good: an update with finite gradients leaves finite weights."""
        for name, tensors in (
            ("loss", [torch.tensor(loss)]),
            ("gradient", [p.grad for p in self.optimizer.parameters if p.grad is not None]),
            ("statistic of BatchNorm", list(self.model.buffers())),
        ):
            if not all_finite(tensors):
                where = f"the {name} at step {self.n_steps + 1} is not finite (loss {loss:.4g})"
                raise NotFinite(f"{where}: lower lr or raise temperature")

    @contextmanager
    def _undone_if_not_finite(self) -> Iterator[None]:
        """A step whose numbers break has changed nothing; of several updates those before it stay."""
        statistics = [buffer.clone() for buffer in self.model.buffers()]
        policy, generator = self._policy_state(), self.generator.get_state()
        try:
            yield
        except UserError as error:
            if self.is_finite() and not isinstance(error, NotFinite):
                raise
            for buffer, value in zip(self.model.buffers(), statistics, strict=True):
                buffer.copy_(value)
            self.buffer.undo()
            self._load_policy_state(policy)
            self.generator.set_state(generator)
            raise NotFinite(str(error)) from None

    def is_finite(self) -> bool:
        """Whether all weights, statistics and moments are."""
        moments = [*self.optimizer.means, *self.optimizer.squares]
        return all_finite([*self.model.parameters(), *self.model.buffers(), *moments])

    # ------------------------------------------------------------------------------------------------------------

    def fit(self, shape: Sequence[int]) -> MemoryPlan:
        """How a step on segments of this shape keeps within the memory; an error if it cannot."""
        assert self.memory is not None
        if self.plan is None:
            self.optimizer.keep_gradients()
            n_images = self.buffer.size + 2 * shape[0]  # the segment before and after it is in the buffer
            self.plan = make_plan(
                self.model, self.memory, tuple(shape[1:]), 2 * self.batch_size, n_images, nt_xent, contrast_score
            )
            if self.plan.chunk_size is not None:
                self.model.pixels_at_once = max(1, self.plan.chunk_size // 2) * shape[-2] * shape[-1]
        return self.plan

    def join(self, ranks: Alone) -> None:
        """Share the encoder with learners in other processes, which do the same, before the first step.

        From then on each step is one of all ranks: the loss contrasts the batches of all, which are of one size.
        """
        if ranks.n > 1 and self.memory is not None:
            raise UserError("memory is for one process: with several ranks use a smaller batch_size each")
        if ranks.n > 1 and self._trained is not self.model:
            raise UserError("compile is for one process: leave it out with several ranks")
        self.ranks = ranks
        self._trained = ranks.share(self._trained)
        if ranks.index:  # other views on each rank; those of the first are as if it were alone
            seed = torch.randint(2**62, (ranks.index,), generator=self.generator, device=self.device)[-1]
            self.generator.manual_seed(int(seed))

    def leave(self) -> None:
        """Go on alone, with the encoder of all."""
        if self.ranks.n == 1:  # as before, compiled if it was
            return
        self._trained = self.model
        self.ranks.unshare(self.model)
        self.ranks.close()
        self.ranks = Alone()

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on.

        copy: False gives the tensors themselves, for one who is done with them before the next step.
        """
        model = self.model.state_dict()
        return {
            "n_steps": self.n_steps,
            "model": {name: tensor.clone() for name, tensor in model.items()} if copy else model,
            "optimizer": self.optimizer.state_dict(copy),
            "buffer": self.buffer.state_dict(copy),
            "policy": self._policy_state(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        buffer = Buffer(self.buffer.size, self.device)
        buffer.load_state_dict(state["buffer"])
        load_weights(self.model, state["model"], "the saved state")  # what does not fit has changed nothing until here
        self.buffer, self.n_steps = buffer, state["n_steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_policy_state(state["policy"])
        self.generator.set_state(state["generator"])

    def _policy_state(self) -> dict[str, Any]:
        return self.policy.state_dict() if hasattr(self.policy, "state_dict") else {}

    def _load_policy_state(self, state: dict[str, Any]) -> None:
        if hasattr(self.policy, "load_state_dict"):
            self.policy.load_state_dict(state)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """By their norms, of which one is infinite too if a gradient is too large to be squared, as Adam does."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.stack(torch._foreach_norm(floating)).isfinite().all())


def find_device(name: torch.device | str | None) -> torch.device:
    """The device asked for, or a GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UserError(f"no device {name!r}: use cpu or cuda") from None
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device.type):
        raise UserError(f"no device {name!r} on this machine or in this build of torch: use cpu")
    return device


def checked_images(images: Tensor | np.ndarray, what: str) -> Tensor:
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))  # a flipped view has negative strides
    if images.dtype != torch.uint8:
        raise UserError(f"{what} is {images.dtype}: give torch.uint8 images with values from 0 to 255")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise UserError(f"{what}'s shape is {tuple(images.shape)}: give n x 3 x height x width with n at least 1")
    return images
