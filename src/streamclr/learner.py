"""The method is `Learner.learn_many`: read it first. Every other file is a noun that it calls."""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamclr.base.errors import NotFinite, UserError
from streamclr.base.options import parse_size
from streamclr.base.tensors import checked_weights
from streamclr.buffer import Buffer, n_that_fit
from streamclr.compute.chunked import backward, check_can_chunk
from streamclr.compute.device import find_device
from streamclr.compute.finite import all_finite, check_finite
from streamclr.compute.memory import MemoryPlan, Work, make_plan, unlimited_peak
from streamclr.compute.ranks import OneProcess
from streamclr.encoders.architecture import SCRATCH_ENCODERS, encoder_name
from streamclr.encoders.compact import compact
from streamclr.encoders.inference import checked_images, seeded
from streamclr.encoders.projection import ContrastiveModel, FeatureExtractor
from streamclr.encoders.resnet import resnet18
from streamclr.encoders.stages import set_trained
from streamclr.encoders.weights import make_encoder
from streamclr.kept import KeptViews, kept_bytes, kept_shape
from streamclr.loss import checked_loss, nt_xent
from streamclr.policy import (
    Policy,
    build_policy,
    check_resumable,
    draw_batch,
    load_policy_state,
    load_saved_policy,
    policy_name,
    policy_state,
)
from streamclr.recipe import OPTIMIZERS, POSITIVES, build_loss, find_recipe, usual_batch, usual_lr
from streamclr.scenes import REACH, draw_neighbours, find_scenes
from streamclr.score import contrast_score
from streamclr.step import Step
from streamclr.views import ViewPairs, Views, WeakView, build_views, build_weak_view, can_chunk

PRECISIONS = ("fp32", "bf16")


class Learner:
    """Learns an encoder from segments of an unlabelled stream, with a small buffer of the images that teach the most.

    encoder: the name of a public encoder, as "mobilenet_v2", which is then adapted; any module that maps images to
        features; or a ContrastiveModel, which includes a projection head. Default: that of the recipe.
    recipe: `paper` or `device`, which gives what is not given here (see streamclr.recipe); default: `device` for an
        encoder with a name, else `paper`.
    policy: which images stay in the buffer: an object, or `name?option=value`.
    buffer: N, images in the buffer; or its size in bytes, as "10M".
    batch_size: images of one update, drawn uniformly from the buffer.
    loss: `nt-xent`, `vicreg`, `barlow-twins`, `byol` or `cla`; any function of the projections z0 and z1, or a Loss.
    temperature: of a loss by name that takes one.
    optimizer: `adam`, `muon` or `orthogonal-adam`.
    lr: learning rate.
    lr_half: steps after which it has fallen to half. It falls as 1/√t, because nobody knows when a stream ends; 0: it
        is constant.
    views: `strong`, or any function of images and a generator: views to train on, float in [0, 1].
    weak_view: of the contrast score: `flip`, `vertical-flip`, `shift`, `grey`, or any function of images.
    precision: of the encoder's arithmetic in training: `fp32`, or `bf16`, which is faster on a GPU and on some CPUs.
    positives: `views` contrasts two views of one frame, `time` views of two neighbouring frames, the second of which is
        kept in the buffer beside the first.
    train: which parts of the encoder learn: "all", "norms", or as many last stages as "3".
    reach: frames between two neighbours at most.
    kept_views: so many views of each image, and of its neighbour, are made once, as it enters the buffer, and what the
        frozen stages make of them is kept beside it: an update then takes a fraction of the time, and the buffer more
        memory for each image. 0: views are drawn anew for each update.
    memory: limit for the whole process, as "600M" or "1.5G"; the views then go through the model in chunks, with the
        same result. A limit that is too low is refused at the first segment.
    compile: compile the model with torch: narrow encoders gain a third, after a minute; needs a C++ compiler.
    seed: of the initial weights, the views, the draws and dropout.
    device: where the model and the buffer are; default: a GPU if there is one.

    `learner.model` is the encoder with its projection head, `learner.buffer` and `learner.policy` are what they say.

    >>> from streamclr import ContrastScoring, Learner, open_stream, resnet18
    >>> learner = Learner(resnet18(width=4), policy=ContrastScoring(rescore_every=50), buffer=8)
    >>> for images in open_stream("synthetic:", size=16).segments(8, until=24):
    ...     step = learner.learn_many(images)  # uint8, 8 x 3 x 16 x 16
    >>> learner
    Learner(resnet18, buffer 8 of 8, step 3)
    """

    def __init__(
        self,
        encoder: nn.Module | str | None = None,
        policy: Policy | str | None = None,
        buffer: int | str | None = None,
        *,
        recipe: str | None = None,
        batch_size: int | None = None,
        updates_per_segment: int = 1,
        loss: str | Callable[..., Tensor] = "nt-xent",
        temperature: float | None = None,
        optimizer: str | None = None,
        lr: float | None = None,
        lr_half: int | None = None,
        weight_decay: float = 1e-4,
        views: str | Views = "strong",
        weak_view: str | WeakView = "flip",
        positives: str | None = None,
        train: str | None = None,
        reach: int = REACH,
        precision: str = "fp32",
        kept_views: int = 0,
        memory: str | int | None = None,
        compile: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        self.device = find_device(device)
        self.ranks = OneProcess()
        named = isinstance(encoder, str)
        usual = find_recipe(recipe or ("device" if named else "paper"), named and encoder not in SCRATCH_ENCODERS)
        policy = usual.policy if policy is None else policy
        self.policy = build_policy(policy, seed=seed) if isinstance(policy, str) else policy
        buffer = usual.buffer if buffer is None else buffer
        temperature = usual.temperature if temperature is None else temperature
        optimizer, self.lr = usual_lr(usual, optimizer, lr)
        self.lr_half = usual.lr_half if lr_half is None else lr_half
        self.positives = usual.positives if positives is None else positives
        if self.positives not in POSITIVES:
            raise UserError(f"positives is {positives!r}: use {' or '.join(POSITIVES)}")
        # In bytes: known when the first segment tells the size of an image.
        self._buffer_bytes = buffer if isinstance(buffer, str) else None
        self._kept_shape: tuple[int, ...] | None = None  # of what is kept of an image, known as late
        self.batch_size = usual_batch(usual.batch, buffer) if batch_size is None else batch_size
        self.buffer = self._make_buffer(self.batch_size if isinstance(buffer, str) else buffer)
        for name, value, least in (
            ("batch_size", self.batch_size, 2),
            ("updates_per_segment", updates_per_segment, 1),
            ("reach", reach, 1),
            ("lr_half", self.lr_half, 0),
        ):
            if value < least:
                raise UserError(f"{name} is {value}: use at least {least}")
        self.reach = reach
        if precision not in PRECISIONS:
            raise UserError(f"precision is {precision!r}: use {' or '.join(PRECISIONS)}")
        if not (temperature > 0 and self.lr > 0 and weight_decay >= 0):
            due = f"temperature ({temperature}) and lr ({self.lr}) must be above 0"
            raise UserError(f"{due}, weight_decay ({weight_decay}) not below")
        self.updates_per_segment = updates_per_segment
        self.loss = build_loss(loss, temperature)
        self.views = build_views(views, usual.crop, usual.flip, usual.side)
        with seeded(seed):
            if isinstance(encoder, str):
                encoder = make_encoder(encoder)
            elif encoder is None:
                encoder = compact() if recipe == "device" else resnet18()
            if not isinstance(encoder, ContrastiveModel):
                encoder = ContrastiveModel(encoder, projection=usual.projection)
            model: ContrastiveModel = encoder
            has_stages = hasattr(model.encoder, "stages")
            set_trained(model, train or (usual.train if has_stages else "all"))
            self.model = model.to(self.device)
            self.loss.begin(self.model)
            self._random_state = torch.get_rng_state()  # of the model's own randomness, such as dropout
        self.loss.to(self.device)
        self.model.in_bf16, self.model.weak_view = precision == "bf16", build_weak_view(weak_view)
        learning = [*self.model.parameters(), *self.loss.parameters()]
        self.optimizer = OPTIMIZERS[optimizer](learning, self.lr, weight_decay)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.kept: KeptViews | None = None
        if kept_views:
            self.kept = KeptViews(kept_views, self.views, self.generator)
            kept_shape(kept_views, self.model.encoder, self.views, (3, 64, 64))  # refused now, not at the first segment
            with_target = f"the loss {self.loss!r} with a target network"
            for name, given in (("memory", memory), ("compile", compile), (with_target, self.loss.target)):
                if given:
                    raise UserError(f"both kept_views and {name} are given: use one of them")
        self.n_steps = 0
        self.memory = None if memory is None else parse_size(memory)
        self.plan: MemoryPlan | None = None  # made at the first segment, when the images' size is known
        if self.memory is not None:
            if precision == "bf16":
                raise UserError(
                    "both memory and precision bf16 are given: chunks are computed in fp32, use one of them"
                )
            if compile:
                raise UserError("both memory and compile are given: a compiled model takes the whole batch at once")
            if self.device.type != "cpu":
                raise UserError(f"memory is for the CPU, the device is {self.device}: use a smaller batch_size")
            check_can_chunk(self.model)
        if compile and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
            raise UserError("compile needs a C++ compiler, and none was found: install g++, or leave compile out")
        self._trained: nn.Module = torch.compile(self.model) if compile else self.model  # type: ignore[assignment]

    def __repr__(self) -> str:
        room = self.buffer.size if self._buffer_bytes is None or self.buffer.n_seen else self._buffer_bytes
        held = f"buffer {len(self.buffer)} of {room}"
        return f"Learner({encoder_name(self.model)}, {held}, step {self.n_steps})"

    @property
    def encoder(self) -> nn.Module:
        """The encoder in training, which takes standardised images; for features use `extractor()`."""
        return self.model.encoder

    def extractor(self) -> FeatureExtractor:
        """A frozen copy of the encoder as it is now: uint8 images, n x 3 x H x W, to features, n x d, on the CPU."""
        return FeatureExtractor(self.model)

    # ------------------------------------------------------------------------------------------------------------
    # The method (Sec. III): choose the buffer anew from the buffer and the segment, then update on the buffer.

    def learn_many(self, images: Tensor | np.ndarray, tracks: Tensor | None = None) -> Step:
        """Learn from one segment I of the stream: uint8 images, n x 3 x H x W, any n.

        tracks: for positives in time: a number for each image, equal for those without a cut between them; default:
            cuts are found in the pixels.
        """
        images = checked_images(images, "the segment")
        self.fit(images.shape)
        n_before, started = len(self.buffer), perf_counter()
        with self._undone_if_not_finite(), self._own_random_state():
            pool = self.buffer.pool(images, self._neighbours(images, tracks))  # B ∪ I
            with self.ranks.together():
                keep = self.policy.keep(pool, min(self.buffer.size, len(pool)), self.model)  # topN of S(x), Eq. 3
                n_kept = self.buffer.replace(pool, keep)  # the new B
            if self.kept is not None:
                self.kept.fill(self.buffer, self.model)
            losses, scored = [], perf_counter()
            self.optimizer.lr = self.lr / math.sqrt(1 + 3 * self.n_steps / self.lr_half) if self.lr_half else self.lr
            for _ in range(self.updates_per_segment):
                rows = draw_batch(self.policy, self.buffer, self.batch_size, self.model, self.generator)
                loss, spread = self._backward(self._views(rows))  # of the projections z0 and z1, Eq. 1
                self.optimizer.step()
                self.loss.follow(self.model)
                losses.append(loss)
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
            spread=spread,
        )

    def _neighbours(self, images: Tensor, tracks: Tensor | None) -> Tensor | None:
        """A neighbouring frame of each image of the segment, if the second views are of those."""
        if self.positives == "views":
            return None
        if tracks is not None and tracks.shape != (len(images),):
            raise UserError(f"tracks has shape {tuple(tracks.shape)} for {len(images)} images: use one number for each")
        scenes = find_scenes(images) if tracks is None else tracks
        return images[draw_neighbours(scenes.to(images.device), self.generator, self.reach).to(images.device)]

    def _views(self, rows: Tensor) -> ViewPairs | Tensor:
        """Two views of each image in these rows of the buffer: 2n x 3 x H x W, or what is kept of them."""
        if self.kept is not None:
            return self.kept.draw(self.buffer, rows)
        images, neighbours = self.buffer.pairs(rows)  # n x 3 x H x W each
        return ViewPairs(self.views, images, self.generator, neighbours)

    def _backward(self, views: ViewPairs | Tensor) -> tuple[float, float]:
        """Set the gradient of the loss, checked to be finite. Returns the loss and the spread of the projections.

        Both views of all images go through the model in one pass, so that BatchNorm cannot tell them apart; in chunks
        if memory is limited. The loss contrasts the images of all ranks.
        """
        most, least = self.ranks.largest(len(views) // 2, -len(views) // 2)
        if most != -least:
            raise UserError(f"the ranks have batches of {-least:.0f} to {most:.0f} images: give all the same")
        spread, chunk_size = math.nan, self.plan.chunk_size if self.plan else None
        made: Callable[[slice], Tensor] = views.__getitem__ if isinstance(views, Tensor) else views
        model = self.model.from_early if isinstance(views, Tensor) else self._trained
        targets = [self.ranks.gather(t) for t in self.loss.targets(made, len(views), chunk_size)]

        def loss_of_all(z: Tensor) -> Tensor:
            nonlocal spread
            z0, z1 = (self.ranks.gather(half) for half in z.chunk(2))
            spread = 1 - float(torch.cat([z0, z1]).detach().mean(0).square().sum())
            return checked_loss(self.loss(z0, z1, *targets))

        self.model.train()
        self.optimizer.zero_grad()
        with self.ranks.together():
            value = backward(model, made, len(views), loss_of_all, chunk_size)
            gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
            statistics = [*self.model.buffers(), *self.loss.buffers()]
            found = {"loss": [torch.tensor(value)], "gradient": gradients, "statistic of BatchNorm": statistics}
            check_finite(found, self.n_steps + 1, value)
        self.ranks.settle(self.model)
        return value, spread

    @contextmanager
    def _undone_if_not_finite(self) -> Iterator[None]:
        """A step with a number that is not finite changes nothing; of several updates those before it stay."""
        statistics = [buffer.clone() for buffer in self.model.buffers()]
        loss = {name: tensor.clone() for name, tensor in self.loss.state().items()}
        policy, generator = policy_state(self.policy), self.generator.get_state()
        try:
            yield
        except UserError as error:
            if self.is_finite() and not isinstance(error, NotFinite):
                raise
            for buffer, value in zip(self.model.buffers(), statistics, strict=True):
                buffer.copy_(value)
            self.loss.load_state_dict(loss, strict=False)
            self.buffer.undo()
            load_policy_state(self.policy, policy)
            self.generator.set_state(generator)
            raise NotFinite(str(error)) from None

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Dropout and the like draw from torch's global generators: these have the learner's state in a step."""
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            torch.set_rng_state(self._random_state)
            if cuda:
                torch.cuda.manual_seed(int(torch.randint(2**62, ())))
            yield
            self._random_state = torch.get_rng_state()

    def is_finite(self) -> bool:
        """Whether all weights, BatchNorm statistics and Adam's moments are finite."""
        moments = [*self.optimizer.means, *self.optimizer.squares]
        modules = (self.model, self.loss)
        return all_finite([t for one in modules for t in (*one.parameters(), *one.buffers())] + moments)

    def _make_buffer(self, size: int) -> Buffer:
        if self.batch_size > size:
            raise UserError(f"batch_size is {self.batch_size}, and the buffer holds {size}: a batch is drawn from it")
        return Buffer(size, self.device, self.positives == "time", self._kept_shape)

    def _buffer_size(self, shape: Sequence[int]) -> int:
        """How many images of this shape it holds."""
        if self.kept is not None:
            self._kept_shape = kept_shape(self.kept.n, self.model.encoder, self.views, shape)
        if self._buffer_bytes is None:
            return self.buffer.size
        return n_that_fit(self._buffer_bytes, shape, self.positives == "time", kept_bytes(self._kept_shape))

    def fit(self, shape: Sequence[int]) -> MemoryPlan | None:
        """Fit buffer and memory to segments of this shape, once. Returns the plan by which a step keeps to the memory
        limit, if there is one; an error if none does."""
        if not self.buffer.n_seen and (self._buffer_bytes is not None or self.kept is not None):
            self.buffer = self._make_buffer(self._buffer_size(shape[1:]))
        if self.plan is None and self.memory is not None:
            self.optimizer.keep_gradients()
            self.plan = make_plan(self._work(shape), self.memory)
            # A scored image is two views, and a chunk of the update is what fits.
            self.model.max_chunk = max(1, (self.plan.chunk_size or 2 * self.batch_size) // 2)
        return self.plan

    def peak(self, shape: Sequence[int]) -> int:
        """Bytes of memory that the process will take as it learns from segments of this shape; an error if that is not
        known for this model or device."""
        if (plan := self.fit(shape)) is not None:
            return plan.peak
        if self.device.type != "cpu" or self.model.in_bf16 or self._trained is not self.model:
            raise UserError("memory is predicted for the CPU and fp32 alone, and not with compile")
        check_can_chunk(self.model)
        return unlimited_peak(self._work(shape))

    def _work(self, shape: Sequence[int]) -> Work:
        # The segment itself, and its copy behind the buffer; with a neighbour beside each.
        n_images = (self.buffer.size + 2 * shape[0]) * (1 + self.buffer.has_neighbours)
        if self._kept_shape is not None:
            n_images += (self.buffer.size + shape[0]) * kept_bytes(self._kept_shape) // math.prod(shape[1:])
        if not can_chunk(self.views):  # they are made all at once, of 4 bytes where an image has one
            n_images += 8 * self.batch_size
        return Work(self.model, tuple(shape[1:]), 2 * self.batch_size, n_images, nt_xent, contrast_score)

    def join(self, ranks: OneProcess) -> None:
        """Share the encoder with the learners of the other ranks, each of which calls this before its first step.

        From then on all ranks step together: the loss contrasts the batches of all ranks, which have one size.
        """
        if ranks.n > 1 and self.memory is not None:
            raise UserError("memory is for one process: with several ranks use a smaller batch_size each")
        if ranks.n > 1 and self._trained is not self.model:
            raise UserError("compile is for one process: leave it out with several ranks")
        if ranks.n > 1 and self.kept is not None:
            raise UserError("kept_views is for one process: leave it out with several ranks")
        self.ranks = ranks
        self._trained = ranks.share(self._trained)
        ranks.start_alike(self.loss)
        if ranks.index:  # each rank draws other views and other dropout; rank 0 draws as one process does
            seed = int(torch.randint(2**62, (ranks.index,), generator=self.generator, device=self.device)[-1])
            self.generator.manual_seed(seed)
            self._random_state = torch.Generator().manual_seed(seed).get_state()

    def leave(self) -> None:
        """Go on in this process only, with the shared encoder."""
        if self.ranks.n == 1:  # a compiled model stays compiled
            return
        self._trained = self.model
        self.ranks.unshare(self.model)
        self.ranks.close()
        self.ranks = OneProcess()

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on.

        copy: False gives the tensors themselves, for a caller that is done with them before the next step.
        """
        check_resumable(self.policy)
        model, loss = (
            {name: tensor.clone() if copy else tensor for name, tensor in module.state_dict().items()}
            for module in (self.model, self.loss)
        )
        return {
            "n_steps": self.n_steps,
            "model": model,
            "loss": loss,
            "optimizer": self.optimizer.state_dict(copy),
            "buffer": self.buffer.state_dict(copy),
            "policy": policy_state(self.policy),
            "policy_name": policy_name(self.policy),
            "generator": self.generator.get_state(),
            "random_state": self._random_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the learner whose state this is. A state that does not fit changes nothing."""
        if missing := [key for key in STATE_KEYS if key not in state]:
            raise UserError(f"the saved state has no {', '.join(missing)}: use what Learner.state_dict() returned")
        held = state["buffer"].get("images")
        size = self.buffer.size if held is None or not len(held) else self._buffer_size(held.shape[1:])
        buffer, generator = self._make_buffer(size), torch.Generator(self.device)
        buffer.load_state_dict(state["buffer"])
        random_state = state.get("random_state", self._random_state)  # a state of an older version has none
        try:
            generator.set_state(state["generator"])
            torch.Generator().set_state(random_state)
        except (RuntimeError, TypeError) as error:
            raise UserError(f"the saved generator does not fit: {error}: use the device it was saved on") from None
        self.optimizer.check_state_dict(state["optimizer"])
        model = checked_weights(self.model, state["model"], "the saved state")
        loss = checked_weights(self.loss, state.get("loss", {}), "the saved loss")  # an older state has none
        load_saved_policy(self.policy, state["policy"], state.get("policy_name"))
        self.model.load_state_dict(model)
        self.loss.load_state_dict(loss)
        self.optimizer.load_state_dict(state["optimizer"])
        self.buffer, self.generator, self._random_state = buffer, generator, random_state
        if self.kept is not None:
            self.kept.generator = generator
        self.n_steps = state["n_steps"]


STATE_KEYS = ("n_steps", "model", "optimizer", "buffer", "policy", "generator")  # in states of every version
