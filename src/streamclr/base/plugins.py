"""Parts by name: built in, `package.module:Name` of a researcher, or the entry point of an installed package."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Container, Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from streamclr.base import options as opts
from streamclr.base.errors import UserError


class Kind(NamedTuple):
    """A part that has names, by the option of a run that takes them."""

    what: str
    group: str  # of entry points
    form: str  # how one of a researcher is written
    is_a: str  # what it has to be
    n_arguments: int | None = None  # of a function, before its options; None: a class is due
    method: str = "__call__"  # that such a class must have

    @property
    def noun(self) -> str:
        return "class" if self.n_arguments is None else "function"


KINDS = {
    "policy": Kind(
        "policy", "streamclr.policies", "package.module:Class", "a class with keep(pool, size, model)", method="keep"
    ),
    "encoder": Kind("encoder", "streamclr.encoders", "package.module:function", "a function", 0),
    "loss": Kind("loss", "streamclr.losses", "package.module:name", "a function of z0 and z1, or a Loss", 2),
    "views": Kind("views", "streamclr.views", "package.module:name", "a function of images and a generator", 2),
    "weak_view": Kind("weak view", "streamclr.weak_views", "package.module:function", "a function of images", 1),
}
UTF_8 = ("utf-8", "surrogateescape")  # and back again, whatever a file is written in
LIBRARIES = ("hf", "timm")  # of encoders: before a colon they name no module


def reference(kind: str, name: str) -> str | None:
    """`package.module:name` of a part that is not built in; None if there is no such part."""
    if ":" in name:
        return name if is_plugin(name) else None
    return next((found.value for found in entry_points(group=KINDS[kind].group, name=name)), None)


def full_name(kind: str, text: str, built_in: Container[str]) -> str:
    """`name?options` as a plan holds it: of an entry point `package.module:name`, by which any process finds it."""
    name, mark, options = text.partition("?")
    where = None if name in built_in else reference(kind, name)
    return text if where is None else f"{where}{mark}{options}"


def find(kind: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """What has this name: the class or function itself."""
    if name in built_in:
        return built_in[name]
    known = KINDS[kind]
    if (where := reference(kind, name)) is None:
        installed = sorted(one.name for one in entry_points(group=known.group))
        raise UserError(f"no {known.what} {name!r}: {opts.one_of(name, [*built_in, *installed, known.form])}")
    found, is_one = _imported(known, where), inspect.isclass if known.n_arguments is None else callable
    if not is_one(found):
        place, _, wanted = where.partition(":")
        is_what = "" if found is None else f" (it is of the type {type(found).__name__})"
        others = [name for name, value in vars(sys.modules[place]).items() if is_one(value) and name[0] != "_"]
        how = f"give {known.form}, {known.is_a}" + (f"; {opts.one_of(wanted, others)}" if others else "")
        raise UserError(f"{place} has no {known.noun} {wanted}{is_what}: {how}")
    if known.n_arguments is None and not hasattr(found, known.method):
        raise UserError(f"{where} has no method {known.method}: a {known.what} is {known.is_a}")
    return found


def _imported(kind: Kind, where: str) -> Any:
    """None if the module has nothing of that name. A mistake inside the module is raised: its author must see it."""
    place, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # of something that the module itself imports
        how = "install it, or add its directory to PYTHONPATH"
        raise UserError(f"no module {error.name} for the {kind.what} {where}: {how}") from None
    except (TypeError, ValueError):  # the name of a module begins with a dot
        raise UserError(f"no module {place!r} for the {kind.what} {where}: write {kind.form}") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def takes(kind: str, name: str, built_in: Mapping[str, Any]) -> list[str]:
    """The names of the options of what has this name. name: without options."""
    found = find(kind, name, built_in)
    return list(inspect.signature(found).parameters)[_n_arguments(kind, found) :]


def _n_arguments(kind: str, found: Any) -> int:
    """Before the options: a function takes them with its arguments, a class before."""
    return 0 if inspect.isclass(found) else KINDS[kind].n_arguments or 0


def make(kind: str, text: str, built_in: Mapping[str, Any], **usual: Any) -> Any:
    """What `name?option=value` says: an instance of a class, or a function with these options.

    usual: values of options that are not given, for those that take them; None: its own.
    """
    name, given = opts.split(text)
    found, own = find(kind, name, built_in), takes(kind, name, built_in)
    chosen = {key: value for key, value in usual.items() if key in own and value is not None} | given
    what = f"the {KINDS[kind].what} {name}"
    if not inspect.isclass(found):
        return partial(found, **opts.converted(found, chosen, what, _n_arguments(kind, found))) if chosen else found
    made = opts.build(found, chosen, what)
    if KINDS[kind].n_arguments is not None and not callable(made):
        raise UserError(f"{name} cannot be called: {what.partition(' ')[2]} is to be {KINDS[kind].is_a}")
    return made


# ----------------------------------------------------------------------------------------------------------------------
# In other processes and on other machines.


class Plugin(NamedTuple):
    """A part of a researcher, and the source that it comes from: a file, or all those of its package."""

    name: str  # package.module:name
    hash: str  # of the source; empty if there is none
    files: dict[str, str]  # by their paths below a directory of Python's path; none of an installed package

    @classmethod
    def of(cls, name: str) -> "Plugin":
        """As it is found now. Nothing of it is imported."""
        top = name.partition(":")[0].partition(".")[0]
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        content: dict[str, bytes] = {}
        places = [] if spec is None else list(map(Path, spec.submodule_search_locations or [spec.origin or "built-in"]))
        for place in places:
            found = {place.name: place} if place.suffix == ".py" else source_files(place, place.parent)
            content |= {path: file.read_bytes() for path, file in found.items()}
        is_installed = any({"site-packages", "dist-packages"} & set(place.parts) for place in places)
        files = {} if is_installed else {path: text.decode(*UTF_8) for path, text in content.items()}
        return cls(name, hash_of(content) if content else "", files)


def plugins_of(options: Mapping[str, Any]) -> list[Plugin]:
    """Those that the options of a plan name."""
    names = (opts.split(options.get(kind) or "")[0] for kind in KINDS)
    return [Plugin.of(name) for name in dict.fromkeys(names) if is_plugin(name)]


def is_plugin(name: str) -> bool:
    """Whether it is written as `package.module:name`."""
    library, colon, rest = name.partition(":")
    return bool(library and colon and rest) and library not in LIBRARIES


def names_plugin(options: Mapping[str, Any]) -> bool:
    """Whether one of a command's options names a part so, alone or in a list of policies."""
    given = (options.get(name) for name in (*KINDS, "policies"))
    return any(is_plugin(part.strip().partition("?")[0]) for text in given if text for part in text.split(","))


def source_files(directory: Path, base: Path) -> dict[str, Path]:
    """The Python files below a directory, by their paths from `base`."""
    return {file.relative_to(base).as_posix(): file for file in sorted(directory.rglob("*.py"))}


def hash_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:8]


def look_in(directory: str) -> None:
    """Find modules in this directory too, after all others, and in the processes that this one starts."""
    if directory not in sys.path:
        sys.path.append(directory)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if directory not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), directory])


def bring(sent: Iterable[Plugin], directory: Path) -> None:
    """Make sure that this process finds these as they were sent: its own where they are the same, else copies."""
    for plugin in sent:
        if Plugin.of(plugin.name).hash == plugin.hash:
            continue
        if not plugin.files:
            what = f"{plugin.name} is another here, or not installed"
            raise UserError(f"{what}: install the package as it is on the machine that sent the job ({plugin.hash})")
        for path, content in plugin.files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content.encode(*UTF_8))
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
        importlib.invalidate_caches()
