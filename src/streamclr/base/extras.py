"""The extras of this package: which packages each brings, and how to install one here; imports nothing of them."""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

DEVELOPMENT = "dev"  # for the tests of streamclr itself


def extras() -> dict[str, list[str]]:
    """The requirements of each extra, its main package first, as pyproject.toml has them; none without metadata."""
    try:
        found = requires("streamclr") or []
    except PackageNotFoundError:
        return {}
    packages: dict[str, list[str]] = {}
    for line in found:
        requirement, _, marker = line.partition(";")
        if (match := re.search(r"""extra == ["']([\w-]+)["']""", marker)) and match[1] != DEVELOPMENT:
            packages.setdefault(match[1], []).append(requirement.strip())
    return packages


def package_of(requirement: str) -> str:
    """The name alone: flwr of flwr[simulation]>=1.41."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def how_to_install(extra: str) -> str:
    """The command: in a clone of the repository with its constraints, elsewhere the packages by their names."""
    if is_clone():
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install {' '.join(map(shlex.quote, extras().get(extra, [f'streamclr[{extra}]'])))}"


def how_to_install_package(package: str) -> str:
    """The same of a package of the core, or one that belongs to no extra alone."""
    return f"pip install {'-c constraints.txt ' * is_clone()}{package}"


def is_clone() -> bool:
    """Whether this package is imported from a clone of the repository."""
    return (Path(__file__).parents[3] / "constraints.txt").is_file()
