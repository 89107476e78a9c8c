"""Which arguments a reward function takes, by their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping

from rollstream.stages.errors import ConfigError
from rollstream.stages.reward.plugin import Plugin

#: What a reward function may ask for. `target` and `meta` arrive decoded; the others as the columns of `Rollouts`.
SAMPLE_ARGUMENTS = ("response", "target", "prompt", "response_ids", "finish_reason", "meta", "sample_id")


def sample_arguments(plugin: Plugin, params: Mapping[str, object]) -> tuple[str, ...]:
    """The sample arguments that the function takes; all of them if it takes **kwargs.

    Raises ConfigError if it wants an argument that neither a sample nor `params` has, or `params` has one that it does
    not take.
    """
    try:
        signature = inspect.signature(plugin.function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {plugin.name!r}: its arguments can't be read: {error}") from error
    function = plugin.function
    fixed = set(function.keywords) if isinstance(function, functools.partial) else set[str]()
    by_name = {n: p for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    faults = [
        f"argument {n!r} is positional-only; arguments are passed by name"
        for n, p in signature.parameters.items()
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
    ]
    faults += [
        f"argument {n!r} is not known: a function may take {', '.join(SAMPLE_ARGUMENTS)}; give others a default or a "
        f"value, params={{{n!r}: ...}}"
        for n, p in by_name.items()
        if p.default is p.empty and n not in SAMPLE_ARGUMENTS and n not in params
    ]
    faults += [f"params has {n!r}, which is an argument of each sample" for n in params if n in SAMPLE_ARGUMENTS]
    faults += [
        f"params has {n!r}, which the function does not take; it takes {', '.join(by_name) or 'nothing'}"
        for n in params
        if n not in by_name and n not in SAMPLE_ARGUMENTS and not takes_all
    ]
    if faults:
        raise ConfigError([f"reward {plugin.name!r}: {fault}" for fault in faults])
    return tuple(n for n in SAMPLE_ARGUMENTS if (takes_all or n in by_name) and n not in fixed)
