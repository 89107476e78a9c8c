"""Finds the reward function that a config asks for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from rollstream.stages.errors import ConfigError
from rollstream.stages.names import known_names
from rollstream.stages.plugins import import_function
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
        return plugin_of(import_function(function, "reward"))
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
    if not point.attr:
        raise ConfigError(
            f"entry point {point.name!r} must name a function, pkg.mod:fn, not the module {point.value!r}"
        )
    return plugin_of(import_function(f"{point.module}:{point.attr}", "reward"))
