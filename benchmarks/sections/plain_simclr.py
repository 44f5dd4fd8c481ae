"""SimCLR as its users write it: the rival, with nothing that StreamCLR does to be fast.

It follows lightly's example (docs.lightly.ai/examples/simclr.html, examples/pytorch/simclr.py): pictures in memory,
SimCLRTransform, a DataLoader with workers, two forward passes, NTXentLoss, torch.optim.SGD. solo-learn's recipe for
CIFAR (scripts/pretrain/cifar/simclr.yaml) has the same transforms, with a blur and bicubic crops, and LARS.
Written anew, with Pillow, which torchvision's transforms of pictures call too: torchvision cannot be had everywhere.
"""

import math
import os
import random
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (torch.tensor(c).view(3, 1, 1) for c in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))  # ImageNet's
MAX_WORKERS = 8  # lightly's example has them; more than there are cores make it slower, as torch warns


class SimCLRTransform:
    """One view of a picture: SimCLRTransform's defaults; its blur is left out at 32 px, as in lightly's example."""

    def __init__(self, size: int):
        self.size, self.blur = size, 0.5 if size >= 64 else 0.0

    def __call__(self, picture: Image.Image) -> Tensor:
        picture = self.crop(picture)
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if random.random() < 0.8:
            picture = self.jitter(picture)
        if random.random() < 0.2:
            picture = picture.convert("L").convert("RGB")
        if random.random() < self.blur:
            picture = picture.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(MEAN).div_(STD)

    def crop(self, picture: Image.Image) -> Image.Image:
        """The first of ten random boxes that fits, of 8 to 100 % of the picture, scaled to the size."""
        width, height = picture.size
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = random.randint(0, width - w), random.randint(0, height - h)
                picture = picture.crop((left, top, left + w, top + h))
                break
        return picture.resize((self.size, self.size), Image.Resampling.BILINEAR)

    def jitter(self, picture: Image.Image) -> Image.Image:
        """Brightness, contrast, saturation and hue in random order."""
        changes = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, None]
        random.shuffle(changes)
        for change in changes:
            if change is not None:
                picture = change(picture).enhance(random.uniform(0.2, 1.8))
            else:
                hue, saturation, value = picture.convert("HSV").split()
                turned = np.array(hue) + np.uint8(round(255 * random.uniform(-0.2, 0.2)) % 256)
                picture = Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
        return picture


class Pictures(Dataset):
    """Images in memory, as torchvision's CIFAR10 has them: a picture at a time, two views of each."""

    def __init__(self, images: np.ndarray, view: Callable[[Image.Image], Tensor]):
        self.images, self.view = images, view  # n x H x W x 3

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        picture = Image.fromarray(self.images[number])
        return self.view(picture), self.view(picture)


class NTXentLoss(nn.Module):
    def __init__(self, temperature: float = 0.5):
        super().__init__()
        self.temperature = temperature

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        z, n = F.normalize(torch.cat([z0, z1]), dim=1), len(z0)
        logits = z @ z.T / self.temperature
        logits = logits.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
        return F.cross_entropy(logits, (torch.arange(2 * n) + n) % (2 * n))


class SimCLR(nn.Module):
    """backbone: layers that map images to features, n x d."""

    def __init__(self, backbone: nn.Module, n_features: int):
        super().__init__()
        self.backbone = backbone
        self.projection_head = nn.Sequential(
            nn.Linear(n_features, n_features, bias=False),
            nn.BatchNorm1d(n_features),
            nn.ReLU(),
            nn.Linear(n_features, 128, bias=False),
            nn.BatchNorm1d(128),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))


class PlainLoop:
    """The loop over the batches of an epoch.

    images: of one epoch, n x H x W x 3.
    view, loss: of lightly, in place of those of this file.
    """

    def __init__(
        self,
        model: SimCLR,
        images: np.ndarray,
        batch_size: int,
        view: Callable[[Image.Image], Tensor] | None = None,
        loss: nn.Module | None = None,
    ):
        pictures = Pictures(images, view or SimCLRTransform(images.shape[1]))
        n_workers = min(MAX_WORKERS, os.cpu_count() or 1)
        # Kept from epoch to epoch, so that the rival's time has no starts of workers in it.
        self.loader = DataLoader(
            pictures, batch_size, shuffle=True, drop_last=True, num_workers=n_workers, persistent_workers=True
        )
        self.model, self.loss = model.train(), loss or NTXentLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.06)

    def epoch(self) -> float:
        """Seconds from its first batch on. In an epoch of the usual length nobody would notice the wait for that one;
        the batches that the workers have made by then are a gift."""
        started = None
        for x0, x1 in self.loader:
            started = started or time.perf_counter()
            loss = self.loss(self.model(x0), self.model(x1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - started
