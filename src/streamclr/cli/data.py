"""The command `data get`."""

from dataclasses import dataclass
from pathlib import Path

from streamclr.base.options import argument, option
from streamclr.streams.datasets.registry import DATASETS, get


@dataclass(frozen=True)
class GetOptions:
    name: str = argument(f"the dataset: {', '.join(DATASETS)}")
    from_: str | None = option(None, "the official archive or folder, if it is somewhere on this machine")


def get_command(config: GetOptions) -> None:
    print(get(config.name, None if config.from_ is None else Path(config.from_).expanduser()))
