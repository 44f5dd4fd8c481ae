"""The encoder f with its projection head g (Sec. II-A), and the encoder alone, frozen."""

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamclr.base.errors import UserError
from streamclr.base.tensors import load_pth, load_tensors, load_weights
from streamclr.encoders.inference import checked_images, infer, inference_mode

# Public pre-trained weights expect these of ImageNet; no other stream's are known in advance.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ContrastiveModel(nn.Module):
    """Encoder and projection head: images in [0, 1] to unit vectors z = g(f(x)) / |g(f(x))|.

    encoder: any module that maps standardised images (n x 3 x H x W) to features (n x d). Its image_mean and image_std,
        three numbers each, say how to standardise, if it has them.
    projection: the head g: `plain` is the paper's; `batchnorm` has BatchNorm after its first layer, which is narrower.
    """

    mean: Tensor
    std: Tensor
    in_bf16: bool = False  # whether the encoder computes in bfloat16 while it is trained
    weak_view: Callable[[Tensor], Tensor] | None = None  # by which its contrast score is computed; None: the flip
    max_chunk: int | None = None  # images of one forward pass in inference, where memory is limited

    def __init__(self, encoder: nn.Module, projection_size: int = 128, projection: str = "plain"):
        super().__init__()
        self.n_features = n = count_features(encoder)
        self.encoder, self.projection, self.projection_size = encoder, projection, projection_size
        self.head = make_projection(projection, n, projection_size)
        for name, usual in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(getattr(encoder, f"image_{name}", usual)).view(3, 1, 1))

    def train(self, mode: bool = True) -> "ContrastiveModel":
        """Layers without a parameter that learns stay in eval mode: their BatchNorm statistics do not move."""
        super().train(mode)
        for module in self.encoder.modules() if mode else ():
            if is_frozen(module):
                module.eval()
        return self

    def standardise(self, images: Tensor) -> Tensor:
        return (images - self.mean).div_(self.std)

    def features(self, images: Tensor) -> Tensor:
        """h = f(x), n x d."""
        h = _checked_tensor(self.encoder(self.standardise(images))).flatten(1)
        if h.shape[1] != self.n_features:
            raise UserError(f"the encoder returns features of {tuple(h.shape)}, but n_features is {self.n_features}")
        return h

    def early(self, images: Tensor) -> Tensor:
        """What the stages that do not learn make of images in [0, 1]; of a built-in encoder."""
        return self.encoder.early(self.standardise(images))  # type: ignore[operator]

    def from_early(self, early: Tensor) -> Tensor:
        """z of what `early` gave."""
        with self._arithmetic(early):
            features = self.encoder.late(early)  # type: ignore[operator]
        return self.project(features.to(self.mean.dtype))

    def project(self, features: Tensor) -> Tensor:
        """z = g(h) / |g(h)|, n x projection_size."""
        return F.normalize(self.head(features), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        with self._arithmetic(images):
            features = self.features(images)
        return self.project(features.to(self.mean.dtype))

    def _arithmetic(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.training and self.in_bf16)


def is_frozen(module: nn.Module) -> bool:
    """Whether it has parameters and none of them learns (see `set_trained`)."""
    learns = [parameter.requires_grad for parameter in module.parameters()]
    return bool(learns) and not any(learns)


PROJECTIONS = ("plain", "batchnorm")


def make_projection(kind: str, n_in: int, n_out: int) -> nn.Sequential:
    if kind not in PROJECTIONS:
        raise UserError(f"projection is {kind!r}: use {' or '.join(PROJECTIONS)}")
    if kind == "plain":
        return nn.Sequential(nn.Linear(n_in, n_in), nn.ReLU(), nn.Linear(n_in, n_out))
    n_mid = min(n_in, 512)
    return nn.Sequential(nn.Linear(n_in, n_mid, bias=False), nn.BatchNorm1d(n_mid), nn.ReLU(), nn.Linear(n_mid, n_out))


class FeatureExtractor:
    """A frozen copy of a model's encoder: stored images in, features out, for a classifier of your own.

    It standardises the images as in training, runs in eval mode without gradient, and no later step changes it.

    >>> import torch
    >>> from streamclr import FeatureExtractor, Learner, resnet18
    >>> extract: FeatureExtractor = Learner(resnet18(width=4), buffer=8).extractor()
    >>> features = extract(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    >>> features.shape, features.device.type, extract.n_features
    (torch.Size([2, 32]), 'cpu', 32)
    """

    def __init__(self, model: ContrastiveModel):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.n_features = model.n_features

    def __repr__(self) -> str:
        return f"FeatureExtractor({type(self.model.encoder).__name__}, {self.n_features} features)"

    def __call__(self, images: Tensor | np.ndarray) -> Tensor:
        """Features of uint8 images, n x 3 x H x W: n x n_features, on the CPU."""
        return infer(self.model, checked_images(images, "the batch"), self.model.features).cpu()


def model_of(given: Any) -> ContrastiveModel:
    """A model itself, or that of a Learner, a Pretrained or a FeatureExtractor."""
    found = given if isinstance(given, ContrastiveModel) else getattr(given, "model", None)
    if not isinstance(found, ContrastiveModel):
        raise UserError(f"a {type(given).__name__} is no model: give a Learner, its model or its extractor()")
    return found


def count_features(encoder: nn.Module) -> int:
    """How many features an encoder gives: its `n_features`, or what comes out of a blank image."""
    if isinstance(n := getattr(encoder, "n_features", None), int):
        return n
    device, found = next((p.device for p in encoder.parameters()), torch.device("cpu")), set()
    for size in (8, 16, 28, 32, 64, 96, 128, 224):
        out = None
        with inference_mode(encoder), suppress(RuntimeError, ValueError, AssertionError, IndexError):
            out = [encoder(torch.zeros(1, 3, size, size, device=device))]
        if out is not None:  # else it is not made for images of this size
            found.add(_checked_tensor(out[0]).flatten(1).shape[1])
    if len(found) != 1:
        why = "that depends on the size of the image" if found else "it takes no blank image"
        raise UserError(f"cannot tell how many features the encoder gives, {why}: set the attribute encoder.n_features")
    return found.pop()


def _checked_tensor(features: Any) -> Tensor:
    if not isinstance(features, Tensor):
        raise UserError(f"the encoder returns a {type(features).__name__}: return one tensor of features, n x d")
    return features


def load_encoder(encoder: nn.Module, path: Path) -> None:
    """Weights for the encoder: torchvision's names, with or without classifier and projection head, or a run's own."""
    tensors = load_pth(path) if path.suffix in (".pth", ".pt") else load_tensors(path)
    load_weights(encoder, of_encoder(tensors), str(path))


def of_encoder(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's part of weights, by the encoder's own names."""
    if any(key.startswith("encoder.") for key in tensors):
        tensors = {key.removeprefix("encoder."): t for key, t in tensors.items() if key.startswith("encoder.")}
    heads = ("fc.", "classifier.", "projection.")
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(heads)}
