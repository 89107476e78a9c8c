"""The decorator that names a reward function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from rollstream.stages.errors import ConfigError

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=RewardFunction)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A reward function and how it is called."""

    name: str
    function: RewardFunction
    #: True: called once for a group, with a list for each argument; it returns a list.
    batch: bool = False

    @property
    def where(self) -> str:
        return f"{self.function.__module__}:{getattr(self.function, '__qualname__', type(self.function).__qualname__)}"


#: Functions registered in this process, by name.
_registered: dict[str, Plugin] = {}


@overload
def reward(function: F) -> F: ...
@overload
def reward(*, name: str | None = None, batch: bool = False) -> Callable[[F], F]: ...
def reward(function: F | None = None, *, name: str | None = None, batch: bool = False) -> F | Callable[[F], F]:
    """Registers a reward function under its own name, or `name`; gives the function back unchanged.

    A function takes any of response, target, prompt, response_ids, finish_reason, meta and sample_id, by these names.
    With `batch` each is a list, one entry a sample of a group, and the function returns a list. A score is a number,
    None to abstain, or (number, {part: number}). The function may be async.

    Raises ConfigError if another function has the name.

    >>> @reward(name="starts_right")
    ... def starts(response, target):
    ...     return float(response.startswith(target))
    >>> registered()["starts_right"].function is starts
    True
    """
    if function is None:
        return lambda f: _register(f, name=name, batch=batch)
    return _register(function, name=name, batch=batch)


def _register(function: F, *, name: str | None, batch: bool) -> F:
    plugin = Plugin(name=name or getattr(function, "__name__", ""), function=function, batch=batch)
    if not plugin.name:
        raise ConfigError(f"{function!r} has no name of its own: write @reward(name=...)")
    old = _registered.get(plugin.name)
    # The same place again is the same function: a module that was loaded again, a notebook cell that was run again.
    if old is not None and old.where != plugin.where:
        raise ConfigError(
            f"reward name {plugin.name!r} is taken by {old.where}: give {plugin.where} another, @reward(name=...)"
        )
    _registered[plugin.name] = plugin
    return function


def registered() -> dict[str, Plugin]:
    """The registered functions by name."""
    return dict(_registered)


def plugin_of(function: RewardFunction) -> Plugin:
    """The function as it was registered, looking through `functools.partial`; one called per sample if it was not."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    known = next((p for p in _registered.values() if p.function is inner), None)
    name = known.name if known else getattr(inner, "__name__", type(inner).__name__)
    return Plugin(name=name, function=function, batch=known is not None and known.batch)
