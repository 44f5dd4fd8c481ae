"""The commands `export` and `rollback`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from streamclr.base.options import argument
from streamclr.models.export import ExportOptions, export
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory


@dataclass(frozen=True)
class RollbackOptions:
    run: str = argument("the run directory")


def export_command(config: ExportOptions) -> int:
    directory = RunDirectory.existing(config.run)
    out = None if config.out is None else Path(config.out)
    file, parity = export(directory, config.format, config.int8, out, config.fraction, config.pure)
    parity.table(file.name).print()
    print(f"classifier: {file}")
    if parity.problem:
        print(f"streamclr: {file} does not match PyTorch: {parity.problem}", file=sys.stderr)
        return 1
    return 0


def rollback_command(config: RollbackOptions) -> None:
    now, was = Versions(RunDirectory.existing(config.run)).rollback()
    print(f"now serving {now} instead of version {was.number}")
