"""Functions of the user's: found by name on the driver, sent to other processes by value, their lines told in errors.

Modules of installed packages travel by name. All else that is loaded (a user's script and the helpers beside it)
travels by value, for the other process may not have the files.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from rollstream.stages.errors import ConfigError
from rollstream.stages.names import known_names


def import_function(where: str, what: str) -> Callable[..., Any]:
    """The function at "pkg.mod:fn"; `what` says in errors what it is to be, "reward" say.

    Raises ConfigError, with the nearest names, where there is none. What the module's import raises is told as it is.
    """
    if not re.fullmatch(r"[\w.]+:[\w.]+", where):
        raise ConfigError(f"{what} {where!r} must be written pkg.mod:fn")
    place, _, name = where.partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} {where!r}: {error}; a module is looked for in sys.path") from error
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError as error:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{what} {where!r}: module {place!r} has no {name!r}: {known_names(name, names)}") from error
    if not callable(function):
        raise ConfigError(f"{what} {where!r} must be callable, got {type(function).__name__}")
    return function


def name_of(function: object) -> str:
    """Where a function is, as "pkg.mod:fn".

    >>> name_of(known_names)
    'rollstream.stages.names:known_names'
    """
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return f"{inner.__module__}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def dumps(value: object, what: str) -> bytes:
    """The value, pickled with what is the user's. Raises ConfigError with the reason if it can't be."""
    with _by_value(_user_modules()):
        try:
            return cloudpickle.dumps(value)
        except Exception as error:  # a user's __reduce__ may raise anything; it is told, not swallowed
            raise ConfigError(
                f"{what} can't be sent to the process that runs it: {error}. What it refers to must be picklable: make "
                "locks, files and connections inside the function, on its first call"
            ) from error


def source_file(function: object) -> str | None:
    """Where the function is written, for its tracebacks: a function that travels by value forgets it."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function))  # type: ignore[arg-type]
    except TypeError:
        return None


def name_source(function: Any, source_file: str | None) -> None:
    """Gives a function that travelled by value the file that it is written in, so that tracebacks show its lines."""
    function = getattr(function, "__func__", function)  # of a bound method
    code = getattr(function, "__code__", None)
    if code is not None and source_file is not None and not os.path.exists(code.co_filename):
        function.__code__ = code.replace(co_filename=source_file)


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
