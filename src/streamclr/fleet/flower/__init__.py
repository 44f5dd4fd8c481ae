"""Processes of Flower. Only a fleet needs it; its telemetry is switched off here."""

import importlib.util
import os

from streamclr.base.errors import UserError
from streamclr.base.extras import how_to_install


def need_flower(simulation: bool = False) -> None:
    """Call it before the first import of Flower, which reads these variables then."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    if importlib.util.find_spec("flwr") is None:
        raise UserError(f"a fleet needs flwr: {how_to_install('fleet')}, see docs/fleet.md")
    if simulation:
        from streamclr.sweeps.on_ray import need_ray

        need_ray("a simulated fleet")
