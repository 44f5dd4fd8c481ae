"""What a fleet runs, as a bundle of Flower's: the names of two apps that are installed already, and no code.

A SuperNode runs whatever its server sends. A device of a fleet takes this bundle and no other, so that a server that is
not to be trusted can ask for weights and features, and for nothing else.
"""

import hashlib
from typing import TYPE_CHECKING

from streamclr.base.errors import UserError

if TYPE_CHECKING:
    from flwr.supercore.fab import Fab

VERSION = "1.2.0"  # of the protocol between server and devices; both reject any other
APP = f"""[project]
name = "fleet"
version = "{VERSION}"
description = "A streamclr fleet"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "streamclr"

[tool.flwr.app.components]
serverapp = "streamclr.fleet.apps:server"
clientapp = "streamclr.fleet.apps:device"

[tool.flwr.app.config]
fleet = ""
"""


def bundle() -> "Fab":
    from flwr.cli.build import build_fab_from_files
    from flwr.supercore.fab import Fab

    content, _ = build_fab_from_files({"pyproject.toml": APP.encode()})
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


def checked_bundle(fab: "Fab") -> "Fab":
    """The bundle that a server sent, if it is identical to ours."""
    own = bundle()
    if (fab.hash_str, fab.content) != (own.hash_str, own.content):
        raise UserError(f"the server sent another app ({fab.hash_str[:8]}): another version, or not to be trusted")
    return fab
