"""The commands `models get`, `models list`, `export`, `rollback` and `unpin`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from streamclr.base.options import argument, option
from streamclr.base.table import Table
from streamclr.encoders.weights import WEIGHTS, get, places
from streamclr.models.export import ExportOptions, export
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory


@dataclass(frozen=True)
class GetOptions:
    name: str = argument(f"the encoder: {', '.join(WEIGHTS)}, hf:NAME or timm:NAME")
    from_: str | None = option(None, "the weights as a .pth or .safetensors, if they are somewhere on this machine")


@dataclass(frozen=True)
class ListOptions:
    """None: every encoder with public weights is listed."""


@dataclass(frozen=True)
class RollbackOptions:
    run: str = argument("the run directory")


@dataclass(frozen=True)
class UnpinOptions:
    run: str = argument("the run directory")


def get_command(config: GetOptions) -> None:
    print(get(config.name, None if config.from_ is None else Path(config.from_).expanduser()))


def list_command(config: ListOptions) -> None:
    Table("", ["encoder", "public weights"], places()).print()


def export_command(config: ExportOptions) -> int:
    directory = RunDirectory.existing(config.run)
    out = None if config.out is None else Path(config.out)
    file, parity = export(directory, config.format, config.int8, out, config.fraction, config.pure, config.served)
    parity.table(file.name).print()
    print(f"classifier: {file}")
    if parity.problem:
        print(f"streamclr: {file} does not match PyTorch: {parity.problem}", file=sys.stderr)
        return 1
    return 0


def rollback_command(config: RollbackOptions) -> None:
    now, was = Versions(RunDirectory.existing(config.run)).rollback()
    print(f"now serving {now} instead of version {was.number}")
    print(f"it is pinned: no new version takes its place before streamclr unpin {config.run}")


def unpin_command(config: UnpinOptions) -> None:
    now = Versions(RunDirectory.existing(config.run)).unpin()
    print(f"unpinned: a better version may take the place of {now or 'none'}")
