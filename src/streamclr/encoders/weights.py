"""Weights of public encoders, by name."""

from pathlib import Path

from torch import nn

from streamclr.base.tensors import load_tensors, load_weights


def load_encoder(encoder: nn.Module, path: Path) -> None:
    """Weights for the encoder: torchvision's names, with or without classifier and projection head, or a run's own."""
    tensors = load_tensors(path)
    if any(key.startswith("encoder.") for key in tensors):
        tensors = {key.removeprefix("encoder."): t for key, t in tensors.items() if key.startswith("encoder.")}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(("fc.", "projection."))}
    load_weights(encoder, tensors, str(path))
