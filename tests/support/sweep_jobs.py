"""Jobs of a sweep for the tests: each tells in the directory of its argument `told` that it was begun."""

import os
import time
from pathlib import Path

from streamclr import UserError


def _tell(told, name):
    with (Path(told) / name).open("a") as file:
        file.write(f"{os.getpid()}\n")


def count(directory, told, name, **config):
    _tell(told, name)
    beside = directory.parent / "beside.txt"
    return {"name": name, "beside": beside.read_text() if beside.exists() else None}


def fail(directory, told, name, **config):
    _tell(told, name)
    raise UserError(f"{name} cannot be done")


def die_once(directory, told, name, **config):
    _tell(told, name)
    if len((Path(told) / name).read_text().split()) == 1:
        (directory / "half").write_text("done")
        os.kill(os.getpid(), 9)
    return {"half": (directory / "half").exists()}


def sleep(directory, told, name, **config):
    _tell(told, name)
    time.sleep(600)
