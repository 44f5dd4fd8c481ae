"""The method. Read `Learner.learn_many` first: everything else in this package is a noun that it calls."""

import copy
import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamclr.buffer import Buffer
from streamclr.checkpoint import load_weights
from streamclr.encoder import ContrastiveModel, resnet18, seeded
from streamclr.errors import UserError
from streamclr.loss import nt_xent
from streamclr.policy import ContrastScoring, Policy
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

    def __str__(self) -> str:
        return (
            f"step {self.number} | loss {self.loss:.3f} | {self.replaced} of {self.kept + self.replaced} replaced | "
            f"{100 * self.rescored:.1f} % re-scored"
        )


class Learner:
    """Learns an encoder from segments of an unlabelled stream, with a small buffer of the images that teach the most.

    encoder: any module that maps images to features; a ResNet-18 with the small stem unless given.
    policy: which images stay in the buffer; contrast scoring unless given.
    buffer_size: N, images in the buffer.
    batch_size: images of one update, drawn uniformly from the buffer; the whole buffer unless given.
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
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        self.device = find_device(device)
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
            self.model = ContrastiveModel(resnet18() if encoder is None else encoder).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr, weight_decay=weight_decay)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.n_steps = 0

    @property
    def encoder(self) -> nn.Module:
        return self.model.encoder

    # ------------------------------------------------------------------------------------------------------------
    # The method (Sec. III): replace once, update.

    def learn_many(self, images: Tensor | np.ndarray) -> Step:
        """Learn from one segment I of the stream: uint8 images, n x 3 x H x W, n as you like."""
        started = perf_counter()
        n_before = len(self.buffer)
        pool = self.buffer.pool(_checked(images))  # B ∪ I
        keep = self.policy.keep(pool, min(self.buffer.size, len(pool)), self.model)  # topN, Eq. 3
        n_kept = self.buffer.replace(pool, keep)  # the new B
        scored = perf_counter()
        loss = sum(self._update() for _ in range(self.updates_per_segment)) / self.updates_per_segment
        trained = perf_counter()
        self.n_steps += 1
        return Step(
            number=self.n_steps,
            seen=self.buffer.n_seen,
            loss=loss,
            kept=n_kept,
            replaced=len(self.buffer) - n_kept,
            rescored=pool.n_rescored / max(1, n_before),
            score=float(self.buffer.scores.mean()),
            seconds_scoring=scored - started,
            seconds_training=trained - scored,
        )

    def _update(self) -> float:
        """One SimCLR update on a batch; both views in one pass, so that BatchNorm cannot tell them apart."""
        batch = self.buffer.draw(self.batch_size, self.generator)
        views = self.views(torch.cat([batch, batch]), self.generator)
        self.model.train()
        z0, z1 = self.model(views).chunk(2)
        loss = nt_xent(z0, z1, self.temperature)
        if not math.isfinite(value := loss.item()):
            raise UserError(f"the loss is {value} at step {self.n_steps + 1}: lower lr or raise temperature")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return value

    # ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "n_steps": self.n_steps,
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "buffer": self.buffer.state_dict(),
            "policy": self.policy.state_dict() if hasattr(self.policy, "state_dict") else {},
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        buffer = Buffer(self.buffer.size, self.device)
        buffer.load_state_dict(state["buffer"])
        load_weights(self.model, state["model"], "the saved state")  # what does not fit has changed nothing until here
        self.buffer, self.n_steps = buffer, state["n_steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        if hasattr(self.policy, "load_state_dict"):
            self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"])


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


def _checked(images: Tensor | np.ndarray) -> Tensor:
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))  # a flipped view has negative strides
    if images.dtype != torch.uint8:
        raise UserError(f"the segment is {images.dtype}: give torch.uint8 images with values from 0 to 255")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise UserError(f"the segment's shape is {tuple(images.shape)}: give n x 3 x height x width with n at least 1")
    return images
