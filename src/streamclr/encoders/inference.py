"""Running a model on stored images: eval mode, no gradient, a few at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.options import checked_seed

PIXELS_AT_ONCE = 2**16  # in one chunk of inference: 64 images of 32 px; more is no faster


def as_float(images: Tensor) -> Tensor:
    """Stored uint8 images as float in [0, 1]; views are that already."""
    return images / 255 if images.dtype == torch.uint8 else images


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initial weights by a seed of their own; the global generator is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(checked_seed(seed))
        yield


@contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradient. The mode of every module is as before afterwards, and no BatchNorm statistic moves."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def infer(model: nn.Module, images: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """`function` (the model itself unless told) of stored images, in eval mode, with no gradient, in chunks."""
    with inference_mode(model):
        return map_chunks(model, images, function or model)


def map_chunks(model: nn.Module, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of stored images, on the model's device, a few at a time."""
    device = next((p.device for p in model.parameters()), images.device)
    pixels_at_once = getattr(model, "pixels_at_once", PIXELS_AT_ONCE)
    chunk_size = max(1, pixels_at_once // (images.shape[-2] * images.shape[-1]))
    # The last chunk is filled up: oneDNN compiles and keeps kernels for every size that it meets. A single image stays
    # one: who classifies frames as they come does not pay for eight.
    unit = 1 if len(images) == 1 else 8 if len(images) < chunk_size else 32
    parts = []
    for chunk in images.split(chunk_size):
        full = F.pad(chunk, (0,) * 7 + (min(-len(chunk) % unit, chunk_size - len(chunk)),))
        parts.append(function(as_float(full.to(device)))[: len(chunk)])
    return torch.cat(parts)
