"""Finds the reward function that a config asks for."""

from __future__ import annotations

import importlib
import operator
import re
from importlib.metadata import EntryPoint, entry_points

from rollstream.stages.errors import ConfigError
from rollstream.stages.names import known_names
from rollstream.stages.reward.plugin import Plugin, plugin_of, registered

#: A package offers a reward with an entry point of this group; it is imported only when it is named.
GROUP = "rollstream.rewards"


def resolve(function: object) -> Plugin:
    """The plugin for a function, a registered name, the name of an entry point, or "pkg.mod:fn".

    Raises ConfigError if there is none, listing the known names, or if a name has two owners.
    """
    if callable(function):
        return plugin_of(function)
    if not isinstance(function, str):
        raise ConfigError(f"function must be a function or a name, got {type(function).__name__}")
    if ":" in function:
        if not re.fullmatch(r"[\w.]+:[\w.]+", function):
            raise ConfigError(f"reward {function!r} must be written pkg.mod:fn")
        return _import(EntryPoint(name=function, value=function, group=GROUP))
    return _named(function)


def known_rewards() -> list[str]:
    """Names that `resolve` takes, sorted. Imports no plugin."""
    return sorted(registered().keys() | {point.name for point in entry_points(group=GROUP)})


def _named(name: str) -> Plugin:
    points = {point.value: point for point in entry_points(group=GROUP, name=name)}
    plugin = registered().get(name)
    owners = set(points) | ({plugin.where} if plugin else set())
    if len(owners) > 1:
        raise ConfigError(
            f"reward name {name!r} has several owners, {', '.join(sorted(owners))}: name one as pkg.mod:fn"
        )
    if plugin is not None:
        return plugin
    if not points:
        raise ConfigError(f"no reward is named {name!r}: {known_names(name, known_rewards())}; or give pkg.mod:fn")
    return _import(points.popitem()[1])


def _import(point: EntryPoint) -> Plugin:
    """Imports a plugin's module; what its import raises is the plugin's error and is told as it is."""
    if not point.attr:
        raise ConfigError(
            f"entry point {point.name!r} must name a function, pkg.mod:fn, not the module {point.value!r}"
        )
    try:
        module = importlib.import_module(point.module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"reward {point.value!r}: {error}; a module is looked for in sys.path") from error
    try:
        function = operator.attrgetter(point.attr)(module)
    except AttributeError as error:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"reward {point.value!r}: module {point.module!r} has no {point.attr!r}: {known_names(point.attr, names)}"
        ) from error
    if not callable(function):
        raise ConfigError(f"reward {point.value!r} must be callable, got {type(function).__name__}")
    return plugin_of(function)
