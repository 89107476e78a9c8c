"""One sample's run of the rollout function: its tools, and what it is at when it takes too long."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollstream.stages.rollout.function import Tool, is_async
from rollstream.stages.rollout.trajectory import Prompt


@dataclass(eq=False)
class Episode:
    """Of the group's sample number `place`."""

    group_id: str
    place: int
    prompt: Prompt
    #: Requests made so far, and the tools that run; known in the loop's thread.
    num_requests: int = 0
    running: list[str] = field(default_factory=lambda: [])
    task: asyncio.Task[None] | None = None
    #: Requests that the engine has, and when the function was last given back the word; known where the stage runs.
    num_asked: int = 0
    since: float = 0.0

    def wrapped(self, tools: Mapping[str, Tool]) -> dict[str, Callable[..., Coroutine[Any, Any, Any]]]:
        """The tools as the function sees them: each is awaited, and its errors tell its name."""
        return {name: self._wrapped(name, tool) for name, tool in tools.items()}

    def _wrapped(self, name: str, tool: Tool) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.running.append(name)
            try:
                if is_async(tool):
                    return await tool(*args, **kwargs)
                found = await in_thread(lambda: tool(*args, **kwargs))
                return await found if inspect.isawaitable(found) else found
            except Exception as error:
                error.add_note(f"Raised by tool {name!r}.")
                raise
            finally:
                self.running.remove(name)

        return call

    def whereabouts(self, loop: asyncio.AbstractEventLoop, thread: int) -> str:
        """The tools that run and the lines that the function is at, for an error message. `thread` is the loop's."""
        tools = f" in tool {', '.join(map(repr, self.running))}" if self.running else ""
        lines = self._frames(loop, thread)
        return tools + (", at:\n" + "".join(lines) if lines else "")

    def _frames(self, loop: asyncio.AbstractEventLoop, thread: int) -> list[str]:
        if asyncio.current_task(loop) is self.task:  # it does not await: it holds the loop up
            stack = list(traceback.extract_stack(sys._current_frames()[thread]))
        else:
            stack = _waiting_at(self.task.get_coro() if self.task else None)
        begins = next((i for i, frame in enumerate(stack) if frame.filename.endswith(_OWN)), len(stack))
        return traceback.format_list([frame for frame in stack[begins:] if not frame.filename.endswith(_OWN)])


#: What is ours in a stack, and of no interest.
_OWN = ("stages/rollout/episodes.py", "stages/rollout/episode.py")


def _waiting_at(coroutine: Any) -> list[traceback.FrameSummary]:
    """The lines at which it and all that it awaits stand still."""
    frames: list[traceback.FrameSummary] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        coroutine = coroutine.cr_await
    return frames


async def in_thread(call: Callable[[], Any]) -> Any:
    """What the call gives. In a thread of its own, which does not keep the process alive if it never ends."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def tell(found: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((found, error))

    def work() -> None:
        try:
            outcome = call(), None
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: raised again below
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    found, error = await ended
    if error is not None:
        raise error
    return found
