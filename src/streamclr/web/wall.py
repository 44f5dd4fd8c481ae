"""The buffer as a wall of pictures: one sheet with all of them, a map of their features, and why others left."""

import io
import json
import math
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from streamclr.base.errors import UserError
from streamclr.base.tensors import load_metadata, load_tensors

COLUMNS = 16  # pictures in a row of the sheet
MAX_SIDE = 64  # pixels of a picture in the sheet
MAX_PICTURES = 1024  # so that a large buffer does not choke a phone

REASONS = {
    "fifo": "it was the oldest",
    "random": "not drawn at random",
    "reservoir": "replaced at random by a newer image",
    "k-center": "too near to images that stayed",
}


class Wall:
    """The buffer as a run last wrote it."""

    def __init__(self, path: Path, policy: str):
        self.file, self.policy = path / "buffer.safetensors", policy
        self.version = ""
        self.sheets: dict[str, bytes] = {}  # the last two, by version: a client may still ask for the older one
        self.content: dict[str, Any] = {"version": "", "picture": None, "cells": [], "left": [], "n": 0}
        self._changed = 0
        self._axes: Tensor | None = None

    def update(self) -> bool:
        """Read the file again if it has changed. Returns whether it has."""
        try:
            changed = self.file.stat().st_mtime_ns
            if changed == self._changed:
                return False
            tensors, metadata = load_tensors(self.file), load_metadata(self.file)
        except (OSError, UserError):  # none yet, or damaged
            return False
        self._changed = changed
        if not len(tensors["images"]):  # of a run that was stopped before its first step
            return False
        self._show(tensors, json.loads(metadata.get("about", "{}")))
        return True

    def _show(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        images, scores = tensors["images"][:MAX_PICTURES], tensors["scores"][:MAX_PICTURES]
        left = tensors.get("left_images", images[:0])
        lowest = float(scores.min()) if len(scores) and not bool(scores.isnan().any()) else None
        cells = _cells(tensors)
        for cell, (x, y) in zip(cells, self._map(tensors.get("features"), len(images)), strict=True):
            cell |= {"entered": cell["age"] == 0, "x": x, "y": y}
        gone = _cells(tensors, "left_") if "left_scores" in tensors else []
        for i, cell in enumerate(gone):
            why = self._why(cell["score"], lowest, about.get("guards", {}).get(str(cell["arrival"])))
            cell |= {"cell": len(images) + i, "why": why}
        sheet, side = make_sheet(torch.cat([images, left[:MAX_PICTURES]]))
        self.version = secrets.token_hex(16)
        self.sheets = dict([*self.sheets.items(), (self.version, sheet)][-2:])
        self.content = {
            "version": self.version,
            "step": about.get("step"),
            "columns": COLUMNS,
            "cell": side,
            "n": len(cells) + len(gone),
            "policy": self.policy,
            "lowest": lowest,
            "cells": cells,
            "left": gone,
        }

    def _why(self, score: float | None, lowest: float | None, guard: str | None) -> str:
        if guard:
            return f"removed by the guard against {GUARDED[guard]}"
        if self.policy in REASONS:
            return REASONS[self.policy]
        if score is None or lowest is None:
            return "the policy preferred other images"
        return f"score {score:.3f}; lowest score kept {lowest:.3f}"

    def _map(self, features: Tensor | None, n: int) -> list[tuple[float, float]] | list[tuple[None, None]]:
        """The first two principal components, rotated to match the last map so that points do not jump."""
        if features is None:
            return [(None, None)] * n
        features = features[:MAX_PICTURES]
        centred = features.double() - features.double().mean(0)
        if len(features) < 3 or not bool(centred.any()):
            return [(0.0, 0.0)] * len(features)
        axes = torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
        if axes.shape[1] < 2:  # one feature
            axes = torch.nn.functional.pad(axes, (0, 1))
        if self._axes is not None and self._axes.shape == axes.shape:
            u, _, v = torch.linalg.svd(axes.T @ self._axes)
            axes = axes @ u @ v
        self._axes = axes
        plane = centred @ axes
        plane = plane / plane.abs().amax(0).clamp(min=1e-9)
        return [(round(x, 4), round(y, 4)) for x, y in plane.tolist()]


GUARDED = {
    "stay": "images that stay too long",
    "duplicates": "duplicates",
    "quarantine": "images that never get easier",
    "smear": "smears",
    "noise": "noise",
    "blank": "blank frames",
}


def make_sheet(images: Tensor) -> tuple[bytes, int]:
    """A PNG with the pictures in rows of COLUMNS, and the side of each in pixels."""
    side = images.shape[-1]
    while side > MAX_SIDE:
        side = -(-side // 2)
    n_rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * side, max(1, n_rows) * side))
    for i, image in enumerate(images):
        picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
        if picture.size != (side, side):
            picture = picture.resize((side, side), Image.Resampling.BOX)
        sheet.paste(picture, (i % COLUMNS * side, i // COLUMNS * side))
    data = io.BytesIO()
    sheet.save(data, "PNG", compress_level=1)
    return data.getvalue(), side


def _cells(tensors: dict[str, Tensor], prefix: str = "") -> list[dict[str, Any]]:
    columns = (tensors[prefix + name][:MAX_PICTURES].tolist() for name in ("arrivals", "scores", "ages"))
    return [
        {"arrival": arrival, "score": None if math.isnan(score) else round(score, 5), "age": age}
        for arrival, score, age in zip(*columns, strict=True)
    ]
