"""Flower itself, which only a fleet needs: one place to say that it is missing, and that it sends nothing home."""

import importlib.util
import os

from streamclr.base.errors import UserError


def need_flower(simulation: bool = False) -> None:
    """To be called before the first import of Flower, which reads these then."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    if importlib.util.find_spec("flwr") is None:
        raise UserError("a fleet needs flwr: pip install -c constraints.txt -e '.[fleet]', see docs/fleet.md")
    if simulation:
        from streamclr.sweeps.on_ray import need_ray

        need_ray("a simulated fleet")
