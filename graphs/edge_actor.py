"""An edge as a Ray actor: pulls its producers' streaming generators, and so owns what they make.

    host.produce()  -- RecordBatch, Item, RecordBatch, Item ... -->  EdgeActor  -- lease -->  host / runner

Because the edge is the caller, it owns every object; a producer that dies takes nothing with it that it had already
put out. The generators are never retried by Ray: sampling is not repeatable from the middle.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from rollstream.graphs import actors
from rollstream.graphs.edge import EdgeQueue, Failure, Item
from rollstream.graphs.stats import EdgeStats
from rollstream.stages.errors import PluginError, StageError

#: Objects that a producer may be ahead of the edge: two yields make one group.
GENERATOR_AHEAD = 4


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a consumer gets: groups, or nothing yet, or the end, or the error that ended the run."""

    items: tuple[Item, ...] = ()
    drained: bool = False  # all has been given out; what is leased may still come back
    ended: bool = False  # and all is acked
    failure: Failure | None = None


class UpstreamFailed(Exception):
    """A stage stops because an edge before it failed; carries the first failure on."""

    def __init__(self, failure: Failure):
        self.failure = failure
        super().__init__(failure)


class EdgeActor:
    """Async actor around an `EdgeQueue`."""

    def __init__(
        self, name: str, consumers: Sequence[str], max_groups: int, max_bytes: int, lease_s: float, min_groups: int
    ):
        self._queue = EdgeQueue(
            name,
            consumers,
            max_groups=max_groups,
            max_bytes=max_bytes,
            lease_s=lease_s,
            clock=time.monotonic,
            min_groups=min_groups,
        )
        self._changed = asyncio.Condition()

    async def pull(self, stage: str, producers: Sequence[Any]) -> None:
        """Pulls all replicas of `stage` until they end; ends the edge with them, or at once with the first error."""
        pulls = [asyncio.ensure_future(self._pull(stage, p)) for p in producers]
        try:
            await asyncio.gather(*pulls)
        except Exception as error:  # noqa: BLE001 - the process boundary: carried on, down the edge
            self._queue.fail(as_failure(error, stage))
        else:
            self._queue.close()
        for pull in pulls:
            pull.cancel()
        await self._notify()

    async def lease(
        self, consumer: str, at_most: int, *, fill: bool = False, keep: bool = False, timeout_s: float = 10.0
    ) -> Lease:
        """Up to `at_most` groups; waits up to `timeout_s` for the first, then comes back empty."""
        give_up = time.monotonic() + timeout_s
        while True:
            if self._queue.failure is not None:
                return Lease(ended=True, failure=self._queue.failure)
            items = self._queue.lease(consumer, at_most, fill=fill, keep=keep)
            drained, ended = self._queue.drained(consumer), self._queue.ended(consumer)
            left = give_up - time.monotonic()
            if items or ended or left <= 0:
                return Lease(items=tuple(items), drained=drained, ended=ended)
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
                except TimeoutError:
                    continue

    async def ack(self, consumer: str, group_ids: Sequence[str]) -> None:
        self._queue.ack(consumer, group_ids)
        await self._notify()

    async def admit(self, consumer: str, total: int) -> None:
        self._queue.admit(consumer, total)
        await self._notify()

    async def stats(self) -> EdgeStats:
        return self._queue.stats()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _room(self) -> None:
        while not self._queue.has_room():
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), 1.0)
                except TimeoutError:
                    continue

    async def _pull(self, stage: str, producer: Any) -> None:
        stream = producer.produce.options(
            num_returns="streaming", _generator_backpressure_num_objects=GENERATOR_AHEAD
        ).remote()
        while True:
            await self._room()
            part = await anext(stream, None)
            if part is None:
                return
            head_ref = await anext(stream, None)
            # A stream that fails ends in an object that holds the error: a head, or a part without a head.
            head: Item = await (part if head_ref is None else head_ref)
            self._queue.put(dataclasses.replace(head, parts=(*head.parts, part)))
            await self._notify()


def as_failure(error: BaseException, stage: str) -> Failure:
    """The first error behind whatever Ray wrapped around it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, UpstreamFailed):
        return cause.failure
    if isinstance(cause, StageError):
        return Failure(
            stage=cause.stage, subject=cause.subject, cause=cause.cause, plugin=isinstance(cause, PluginError)
        )
    if isinstance(error, RayError):  # its text has the other process's traceback, or how that process ended
        return Failure(stage=stage, subject="", cause=f"{type(error).__name__}: {error}")
    return Failure(stage=stage, subject="", cause="".join(traceback.format_exception(error)))


def make_edge(
    name: str, consumers: Sequence[str], *, max_groups: int, max_bytes: int, lease_s: float, min_groups: int
) -> Any:
    """Starts an edge. It has no CPU of its own."""
    return actors.start(
        EdgeActor, name, list(consumers), max_groups, max_bytes, lease_s, min_groups, max_concurrency=1000
    )
