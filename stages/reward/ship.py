"""A reward function -> bytes that another process can load, on another host too.

Modules of installed packages travel by name. All else that is loaded (a user's script and the helpers beside it)
travels by value, for the other process may not have the files.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cloudpickle

from rollstream.stages.errors import ConfigError
from rollstream.stages.reward.plugin import Plugin


def ship(plugin: Plugin, params: Mapping[str, object]) -> bytes:
    """The function and its parameters, pickled. Raises ConfigError with the reason if they can't be."""
    with _by_value(_user_modules()):
        try:
            return cloudpickle.dumps((plugin.function, dict(params), _source_file(plugin.function)))
        except Exception as error:  # a user's __reduce__ may raise anything; it is told, not swallowed
            raise ConfigError(
                f"reward {plugin.name!r} can't be sent to the process that runs it: {error}. What it refers to must be "
                "picklable: make locks, files and connections inside the function, on its first call"
            ) from error


def _source_file(function: object) -> str | None:
    """Where the function is written, for its tracebacks: a function that travels by value forgets it."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))  # type: ignore[arg-type]
    except TypeError:
        return None


@contextmanager
def _by_value(modules: list[ModuleType]) -> Generator[None]:
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _user_modules() -> list[ModuleType]:
    """Loaded modules that come from files outside the installed packages, this package and the standard library."""
    paths = sysconfig.get_paths()
    standard = tuple(os.path.join(os.path.realpath(paths[name]), "") for name in ("stdlib", "platstdlib"))
    already = cloudpickle.list_registry_pickle_by_value()
    found: list[ModuleType] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            not file
            or name != module.__name__
            or name in already
            or name.partition(".")[0] in ("__main__", "rollstream")
        ):
            continue
        installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
        if not installed and not os.path.realpath(file).startswith(standard):
            found.append(module)
    return found
