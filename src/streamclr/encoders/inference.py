"""Running a model on stored images: eval mode, no gradient, in chunks."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.options import checked_seed

# Images of one forward pass: 64 at 32 px, 16 from 64 px on. ResNet-18 of width 16, one thread, imagenet stem, images/s:
# 96 px 800 in chunks of 7, 1000 of 16, 1080 of 32; 224 px 118 one by one, 198 of 8, 207 of 16, 217 of 32.
PIXELS_IN_CHUNK, MIN_IMAGES_IN_CHUNK = 2**16, 16
# An encoder that chunks its early stages by itself: its late ones, with small maps, want many images.
PIXELS_IN_CHUNK_OF_FIXED = 2**17


def check_stored(images: Tensor) -> None:
    """Refuse what is not a batch of stored images: float and int16 would give other results without any error."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise UserError(
            f"the images are {images.dtype} of shape {tuple(images.shape)}: "
            "give torch.uint8 (0 to 255), n x 3 x height x width"
        )


def checked_images(images: Tensor | np.ndarray, what: str) -> Tensor:
    """At least one stored image, as a tensor."""
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))  # a flipped view has negative strides
    if images.dtype != torch.uint8:
        raise UserError(f"{what} is {images.dtype}: give torch.uint8 images with values from 0 to 255")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise UserError(f"{what}'s shape is {tuple(images.shape)}: give n x 3 x height x width with n at least 1")
    return images


def as_float(images: Tensor) -> Tensor:
    """Stored images as float in [0, 1]."""
    check_stored(images)
    return images / 255


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def holds_generator(part: object) -> bool:
    """Whether a policy, views or a loss have a random generator of their own, whose state would have to be saved."""
    return any(isinstance(value, GENERATORS) for value in getattr(part, "__dict__", {}).values())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator for the initial weights; it is as before afterwards."""
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
    """`function` (default: the model) of stored uint8 images, in eval mode, without gradient, in chunks."""
    with inference_mode(model):
        return map_chunks(model, images, function or model)


def infer_views(model: nn.Module, views: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """As `infer`, of views, which are float in [0, 1] already."""
    if not views.is_floating_point():
        raise UserError(f"the views are {views.dtype}: give float in [0, 1], or stored images to infer()")
    with inference_mode(model):
        return _in_chunks(model, views, function or model)


def map_chunks(model: nn.Module, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of stored uint8 images, which it gets as float on the model's device, in chunks."""
    check_stored(images)
    return _in_chunks(model, images, lambda chunk: function(chunk / 255))


def _in_chunks(model: nn.Module, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    device = next((p.device for p in model.parameters()), images.device)
    chunks_itself = getattr(getattr(model, "encoder", model), "n_fixed", 0)  # see BlockEncoder
    n_pixels = PIXELS_IN_CHUNK_OF_FIXED if chunks_itself else PIXELS_IN_CHUNK
    chunk_size = max(MIN_IMAGES_IN_CHUNK, n_pixels // (images.shape[-2] * images.shape[-1]))
    chunk_size = min(chunk_size, getattr(model, "max_chunk", None) or chunk_size)  # see ContrastiveModel
    # The last chunk is padded: oneDNN compiles and keeps kernels for every size it meets. A single image is not, so
    # that classifying frames one by one does not cost eight.
    unit = 1 if len(images) == 1 else 8 if len(images) < chunk_size else 32
    parts = []
    for chunk in images.split(chunk_size):
        full = F.pad(chunk, (0,) * 7 + (min(-len(chunk) % unit, chunk_size - len(chunk)),))
        parts.append(function(full.to(device))[: len(chunk)])
    return torch.cat(parts)
