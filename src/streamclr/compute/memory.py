"""A memory limit for the whole process: what a step will take is predicted before the first one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.compute.allocator import release_freed_memory
from streamclr.compute.chunked import BatchNormPass, backward, batch_norms, is_large
from streamclr.compute.fast_scoring import precisions
from streamclr.encoders.block_encoder import BlockEncoder
from streamclr.encoders.inference import inference_mode
from streamclr.encoders.projection import ContrastiveModel
from streamclr.encoders.resnet import ResNet

MIB = 2**20
# With the freed memory that is kept, and the holes in it: the default encoder learns in 641 MiB at 64 px where 592 are
# in use, in 969 to 1,072 at 96 px where 804 are, and in 2,267 at 160 px where 1,471 are.
KEPT = 1.3
Loss = Callable[[Tensor, Tensor], Tensor]  # of the projections of two views
Score = Callable[[ContrastiveModel, Tensor, str], Tensor]  # of images, in a precision


@dataclass(frozen=True)
class MemoryPlan:
    """How a step keeps to the memory limit."""

    chunk_size: int | None  # views of one forward pass; None: all of them
    peak: int  # predicted bytes of the whole process

    def __str__(self) -> str:
        chunks = "all views at once" if self.chunk_size is None else f"{self.chunk_size} views at a time"
        return f"{chunks}, {self.peak / MIB:.0f} MiB at most"


def resident() -> int:
    """Resident bytes of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        raise UserError("memory needs /proc/self/statm, which this system does not have: leave memory out") from None
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Peak of the resident bytes of this process. (`ru_maxrss` would include its parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


class Work(NamedTuple):
    """What memory is predicted for."""

    model: ContrastiveModel
    shape: tuple[int, ...]  # of one image
    n_views: int  # of one update
    n_images: int  # in the buffer and the segment
    loss: Loss  # this and the score for one small step, which loads the libraries before memory is measured
    score: Score


def make_plan(work: Work, limit: int) -> MemoryPlan:
    """The plan with the largest chunk that keeps to the limit; a limit that is too low is refused, with the lowest."""
    release_freed_memory()
    fixed, needs = _parts(work)
    if fixed + needs(None) <= limit:
        return MemoryPlan(None, fixed + needs(None))
    fitting = [size for size in range(1, work.n_views) if fixed + needs(size) <= limit]
    if not fitting:
        least = -(-(fixed + needs(1)) // MIB)
        less = "a narrower encoder, GroupNorm" if isinstance(work.model.encoder, ResNet) else "fewer stages that learn"
        side = f"{work.shape[1]}x{work.shape[2]}"
        raise UserError(
            f"memory is {limit / MIB:.0f} MiB, and a step of {work.n_views} views of {side} px takes at "
            f"least {least} MiB here, of which {resident() // MIB} MiB are taken already: use {least}M or more, "
            f"{less}, a smaller batch or smaller images"
        )
    return MemoryPlan(fitting[-1], fixed + needs(fitting[-1]))


def unlimited_peak(work: Work) -> int:
    """Bytes that the process takes while it learns without a limit, when it keeps the memory that a step has freed."""
    fixed, needs = _parts(work)
    return round(KEPT * (fixed + needs(None)))


def _parts(work: Work) -> tuple[int, Callable[[int | None], int]]:
    """Bytes that are taken in any case, and those of a step as a function of the chunk size."""
    needs = _predictor(work.model, work.shape, work.n_views)
    _warm_up(work.model, _blank(work.model, 4, work.shape), work.loss, work.score)
    # Beyond the activations the kernels need reordered weights, per thread the gradient of the largest, and some slack.
    scratch = 4 * max(parameter.nbytes for parameter in work.model.parameters()) + 16 * MIB
    return resident() + work.n_images * torch.Size(work.shape).numel() + scratch, needs


def _predictor(model: ContrastiveModel, shape: tuple[int, ...], n_views: int) -> Callable[[int | None], int]:
    """Bytes of activations as a function of the chunk size, from the sizes for two views."""
    one_view = 4 * torch.Size(shape).numel()
    kept, largest, largest_at_once = _activation_bytes(model, shape)
    # Layers that do not learn save nothing, yet while one runs there are its input, the convolution and the norm.
    plain = max(_saved_bytes(model, shape) // 2, 3 * largest_at_once) + 2 * one_view
    head = 16 * model.n_features  # features and hidden layer, and their gradients
    if not batch_norms(model.encoder):
        return lambda chunk_size: (chunk_size or n_views) * plain + n_views * head

    def work(chunk_size: int | None) -> int:
        if chunk_size is None:
            return n_views * plain
        return n_views * (kept + head) + chunk_size * (max(6 * largest_at_once, 3 * largest) + 4 * one_view)

    return work


def _saved_bytes(model: ContrastiveModel, shape: tuple[int, ...]) -> int:
    """Bytes that autograd keeps from the forward pass of two views."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # else an address could be used twice
        return tensor

    with _unchanged(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(_blank(model, 2, shape))
    return sum(saved.values())


def _activation_bytes(model: ContrastiveModel, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes of one view: at the peak of `BatchNormPass`, 0 where that is not used; of the largest activation; and of
    the largest of which there are all views at once, because its layer is no part of a fixed map."""
    size: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: object, out: Tensor) -> None:
        size[module] = out[0].numel() * out.element_size()

    seen = [module for module in model.encoder.modules() if isinstance(module, nn.Conv2d | nn.MaxPool2d)]
    hooks = [module.register_forward_hook(note) for module in seen]
    with inference_mode(model):
        model(_blank(model, 2, shape))
    for hook in hooks:
        hook.remove()
    largest = at_once = max(size.values(), default=0)
    if isinstance(model.encoder, BlockEncoder):
        with _unchanged(model):
            n_fixed, blocks = model.encoder.n_fixed, model.encoder.blocks
        at_once = max((size[conv] for block in blocks if block.stage >= n_fixed for conv, _ in block.pairs), default=0)
    if not batch_norms(model.encoder):
        return 0, largest, at_once
    encoder = BatchNormPass(model, lambda _: model.mean, [])
    before = [size[block.path[-1][0]] for block in (encoder.stem, *encoder.frozen)]
    x = before[-1] if encoder.frozen else size.get(encoder.stem.pool, before[-1])  # input of the block
    kept, peaks = 0, [x]
    for block in encoder.blocks:
        path = [size[conv] for conv, _ in block.path]
        shortcut = size[block.shortcut[0]] if block.shortcut else 0
        if not is_large(block):
            kept += x
        held = x if is_large(block) else kept
        peaks.append(held + shortcut + _peak_inside(path, block.adds, is_large(block)))
        x = path[-1]
    return max(peaks), largest, at_once


def _peak_inside(path: list[int], adds: bool, large: bool) -> int:
    """The largest sum of what a block's backward pass holds when it comes to one of its convolutions.

    path: bytes of the output of each convolution.
    large: the last convolution is computed again each time, the first before its own gradient.
    """
    last, sums = len(path) - 1, []
    for i, size in enumerate(path):
        held = sum(path[: i + 1]) if not large else sum(path[: min(i + 1, last)]) if i else 0
        gradient = size if i < last else 0
        sums.append(held + gradient + (path[-1] if adds or i == last else 0))
    return max(sums)


def _warm_up(model: ContrastiveModel, views: Tensor, loss: Loss, score: Score) -> None:
    """One small step, undone, and a score: afterwards what libraries load on first use is resident."""
    with _unchanged(model):
        backward(model, lambda rows: views[rows], len(views), lambda z: loss(*z.chunk(2)), chunk_size=2)
    with suppress(RuntimeError):  # no int8 kernels here
        score(model, (255 * views).byte(), "int8" if "int8" in precisions(model) else "fp32")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Train mode; afterwards buffers, gradients, mode and the global generator are as before."""
    buffers, training = [(buffer, buffer.clone()) for buffer in model.buffers()], model.training
    model.train()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        model.train(training)


def _blank(model: ContrastiveModel, n: int, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0)).to(model.mean.device)
