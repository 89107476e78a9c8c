"""A user's rollout function with its tools: found and checked on the driver, shipped to where the stage runs.

    async def rollout(engine, prompt, tools):
        trajectory = Trajectory(prompt)
        while not trajectory.done:
            text = await engine.turn(trajectory)
            word = text.rpartition("look up ")[2]
            if word == text:
                break
            engine.say(trajectory, await tools["dictionary"](word))
        return trajectory

    Rollout.Config(model=..., max_tokens=512, function=rollout, tools={"dictionary": dictionary}, max_turns=4)

In `tools` each one is awaited, whether it is written with `async` or not; what is not runs in a thread of its own. A
function that wants to live with a slow or broken tool says so: `async with asyncio.timeout(5)`, `try`.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.stages import plugins
from rollstream.stages.errors import ConfigError
from rollstream.stages.rollout.trajectory import Trajectory

Function = Callable[..., Awaitable[Trajectory]]
Tool = Callable[..., Any]

ARGUMENTS = ("engine", "prompt", "tools")


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """The function and its tools as bytes, for their modules may be missing where they run."""

    name: str
    tools: tuple[str, ...]
    payload: bytes

    def load(self) -> tuple[Function, dict[str, Tool]]:
        function, tools, files = pickle.loads(self.payload)
        for one, file in zip((function, *tools.values()), files, strict=True):
            plugins.name_source(one, file)
        return function, tools


def ship(function: Function | str, tools: Mapping[str, Tool]) -> Shipped:
    """A function or "pkg.mod:fn", with its tools by name. Raises ConfigError listing all that is wrong with them."""
    found = plugins.import_function(function, "rollout function") if isinstance(function, str) else function
    faults = [*_faults(found), *(f for name, tool in tools.items() for f in _tool_faults(name, tool))]
    if faults:
        raise ConfigError(faults)
    name = plugins.name_of(found)
    files = [plugins.source_file(one) for one in (found, *tools.values())]
    payload = plugins.dumps((found, dict(tools), files), f"rollout function {name!r} with its tools")
    return Shipped(name=name, tools=tuple(sorted(tools)), payload=payload)


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine; looks through partials and at objects that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _faults(function: object) -> list[str]:
    if not callable(function):
        return [f'function must be a function or "pkg.mod:fn", got {type(function).__name__}']
    name, faults = plugins.name_of(function), list[str]()
    if not is_async(function):
        faults.append(f"rollout function {name!r} must be written `async def`: it waits for the engine")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        faults.append(
            f"rollout function {name!r} must take ({', '.join(ARGUMENTS)}), passed by these names; it takes "
            f"{signature}: {error}"
        )
    return faults


def _tool_faults(name: object, tool: object) -> list[str]:
    if not isinstance(name, str):
        return [f"names of tools must be text, got {name!r}"]
    if not callable(tool):
        return [f"tool {name!r} must be callable, got {type(tool).__name__}"]
    return []
