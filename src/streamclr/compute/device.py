"""The device that a learner computes on."""

import torch

from streamclr.base.errors import UserError


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
