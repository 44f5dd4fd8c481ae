"""The options of a fleet's commands."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.options import argument, one_of, option, split
from streamclr.encoders.architecture import ENCODERS
from streamclr.fleet.average import STATISTICS
from streamclr.recipe import LOSSES
from streamclr.records import options as run
from streamclr.records.options import RunOptions, as_run
from streamclr.views import VIEWS

# What the learners of all devices have in common: the server sends it with every round, and the weights.
SHARED = ("size", *(field.name for field in fields(run.ModelOptions) if field.name not in ("init", "seed")))


@dataclass(frozen=True)
class RoundsOptions:
    """How a fleet averages."""

    rounds: int = option(50, "rounds in all, those of an earlier start in --out included")
    round_images: int = option(2560, "images of its stream that a device learns from in a round")
    momentum: float = option(0.0, "of the server: share of the last step that is added to the mean of the updates")
    slow: float = option(0.0, "decay, as 0.9, of the moving average that is kept for use; 0: the last round's encoder")
    statistics: str = option("shared", f"of BatchNorm: {' or '.join(STATISTICS)}")
    fraction: float = option(1.0, "share of the devices that are asked in a round, to learn or for their labels")
    min_devices: int = option(2, "devices to wait for before a round")
    deadline: float = option(600.0, "seconds after which a round goes on without those that have not answered")
    patience: float = option(3.0, "it does so sooner, after this many times what half of the devices took")
    head_every: int = option(10, "train the classifier on the labels of all devices every N rounds, and at the end")

    def check(self) -> None:
        for name in ("rounds", "round_images", "min_devices", "head_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: use at least 1")
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction is {self.fraction}: use more than 0 and up to 1")
        if not self.deadline > 0:
            raise UserError(f"deadline is {self.deadline}: use a number of seconds above 0")
        if not self.patience >= 1:
            raise UserError(f"patience is {self.patience}: use 1 or more")

    @property
    def of_the_rounds(self) -> dict[str, Any]:
        """What cannot be changed while rounds go on, beside the learner's own options."""
        return {name: getattr(self, name) for name in ("round_images", "momentum", "slow", "statistics")}


# The fields of the last base come first, in `--help` too.
@dataclass(frozen=True)
class SimulateOptions(RoundsOptions, run.LearnerOptions, run.PolicyOptions, run.StreamOptions):
    """Simulate a fleet over parts of a dataset, with Flower's simulation engine, and test its encoder."""

    devices: int = option(10, "number of devices")
    split: str = option("classes:2", "classes:N, N classes for each device, or stc, an even share of all")
    dropout: float = option(0.0, "share of the devices that drop out of each round, at random")
    labels: str | None = option(None, "share of its images that each device has labels of, as 1%")
    workers: int | None = option(None, "devices that learn at the same time [one for each core]")
    deadline: float = option(86_400.0, "seconds after which a round goes on without those that have not answered")
    out: str = option("runs/fleet", "the directory, new or with these rounds unfinished in it")


@dataclass(frozen=True)
class ServerOptions(RoundsOptions, run.ModelOptions):
    """Serve a fleet: start Flower's SuperLink with TLS, let the registered devices in, and average round by round."""

    size: int = option(96, "side of the images in pixels")
    seed: int = option(0, "of the initial weights")
    keys: str | None = option(None, "the directory that `fleet keys` made: certificate, and public keys of the devices")
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 for all")
    port: int = option(9443, "port to listen at")
    insecure: bool = option(False, "without TLS and keys: anybody may join and read the traffic")
    out: str = option("runs/fleet", "the directory, new or with these rounds unfinished in it")

    @property
    def learner(self) -> RunOptions:
        """What the devices' learners have in common, and their first weights."""
        return as_run(self, out=None)


@dataclass(frozen=True)
class JoinOptions:
    """How a device reaches its fleet."""

    server: str = option("", "address of the server, host:port")
    key: str | None = option(None, "the device's private key, made by `fleet keys`")
    ca: str | None = option(None, "the certificate that vouches for the server: ca.crt of `fleet keys`")
    insecure: bool = option(False, "without TLS and key, for a server that is started so")


@dataclass(frozen=True)
class DeviceOptions(run.BufferOptions, run.PolicyOptions, JoinOptions, run.SourceOptions):
    """Join a fleet: start Flower's SuperNode, and learn from a camera of one's own when the server asks."""

    source: str = option("", "where the images come from, as in rtsp://camera/1 or 0")
    label_budget: str | None = option("500", "keep images to ask a person about, with `streamclr label OUT`")
    seed: int = option(0, "of the views and the draws")
    out: str = option("runs/device", "the run directory of this device")


@dataclass(frozen=True)
class KeysOptions:
    """Make the certificate of a fleet's server, and a key for each device; again: keys for more devices."""

    directory: str = argument("where they are kept; private keys in there are for their owner alone")
    host: str = option("localhost,127.0.0.1", "names and addresses by which devices know the server, with commas")
    devices: int = option(1, "how many device keys there shall be")
    days: int = option(825, "how long the certificate is valid")


def check_built_in(shared: Mapping[str, Any]) -> None:
    """A device builds what the server names: never a model from elsewhere, or a function. None is the usual one."""
    for name, known in (("encoder", ENCODERS), ("loss", LOSSES), ("views", VIEWS)):
        given = split(shared[name] or "")[0]
        if given and given not in known:
            plural = {"loss": "losses", "encoder": "encoders"}.get(name, name)
            raise UserError(f"a fleet has one of streamclr's own {plural}, not {given!r}: {one_of(given, known)}")


def learner_options(shared: dict[str, Any], own: dict[str, Any]) -> RunOptions:
    """The options of a device's learner: those of the fleet, and its own."""
    if missing := [name for name in SHARED if name not in shared]:
        raise UserError(f"the server did not send {missing[0]}: update streamclr on the server")
    check_built_in(shared)
    return RunOptions(**own | {name: None if shared[name] == "" else shared[name] for name in SHARED})
