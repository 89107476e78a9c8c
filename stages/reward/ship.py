"""A reward function -> bytes that another process can load, on another host too."""

from __future__ import annotations

from collections.abc import Mapping

from rollstream.stages import plugins
from rollstream.stages.reward.plugin import Plugin


def ship(plugin: Plugin, params: Mapping[str, object]) -> bytes:
    """The function and its parameters, pickled. Raises ConfigError with the reason if they can't be."""
    value = (plugin.function, dict(params), plugins.source_file(plugin.function))
    return plugins.dumps(value, f"reward {plugin.name!r}")
