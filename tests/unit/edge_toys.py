"""What the tests of edges have in common: groups, producers without Ray, and short ways to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from rollstream.graphs.edge import EdgeQueue
from rollstream.graphs.edge_actor import EdgeActor
from rollstream.graphs.item import Item, Left, Part
from rollstream.graphs.journal import Journal

ROWS = pa.RecordBatch.from_pydict({"sample_id": ["s0", "s1"], "n": [1, 2]})


# For the queue -------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def item(order: int, nbytes: int = 10, group_id: str = "") -> Item:
    part = Part(edge="a", nbytes=nbytes)
    return Item(group_id=group_id or f"g{order}", order=order, version=0, birth=f"b{order}", num_rows=1, parts=(part,))


def left(order: int) -> Left:
    return Left(order=order, group_id=f"g{order}", kind="filtered", stage="a", reason="dull")


def given(edge: EdgeQueue, at_most: int, consumer: str = "b", *, holder: str = "b/0", **how: bool) -> list[int]:
    """Orders of the groups of one lease."""
    return [found.order for found in edge.lease(consumer, at_most, holder=holder, **how)]


# For the actor -------------------------------------------------------------------------------------------------------


def head(order: int, group_id: str = "", **further: Any) -> tuple[Item, pa.RecordBatch]:
    rest: dict[str, Any] = {"version": 0, "birth": f"b{order}", "num_rows": 2, "parts": (Part(edge="a", nbytes=1),)}
    return Item(group_id=group_id or f"g{order}", order=order, **(rest | further)), ROWS


def producer(*objects: Any, then_wait: bool = False, asked: list[Any] | None = None) -> Any:
    """Streams each object as an awaitable, an exception as one that raises; then ends, or gives no more for ever."""

    async def stream(holder: str, known: Any):
        if asked is not None:
            asked.append((holder, known))
        await asyncio.sleep(0)
        for thing in objects:
            ref: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ref.set_exception(thing) if isinstance(thing, Exception) else ref.set_result(thing)
            yield ref
        if then_wait:
            await asyncio.get_running_loop().create_future()

    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=stream))
    return SimpleNamespace(produce=made)


class Inlet:
    """The edge before: takes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.ack = SimpleNamespace(remote=lambda stage, orders: self.told.append((stage, orders)))
        self.renew = SimpleNamespace(remote=lambda stage, holder: self.told.append((stage, holder)))


def run(edge: EdgeActor, do: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(do(), 5))


def pull(edge: EdgeActor, *producers: Any, inlet: Any = None) -> Any:
    """What a consumer is given once the edge has pulled its producers to their ends."""

    async def do() -> Any:
        await asyncio.gather(*(edge.pull(n, p, f"a/{n}", inlet) for n, p in enumerate(producers)))
        return await edge.lease("b", 8, holder="b/0", timeout_s=0)

    return run(edge, do)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


def journalled(folder: Path) -> list[int]:
    """Orders in the journal as a new process would find it."""
    return [head["order"] for head, _ in Journal(folder / "journal" / "a").refill()]
