"""An edge as a Ray actor: pulls its producers' streaming generators, and so owns what they make.

    host.produce()  -- (Item, RecordBatch), ... -->  EdgeActor  -- lease -->  host / runner
                                                     |      |-- ack -->  the edge before, once the group is safe here
                                                     journal

Because the edge is the caller, it owns every object; a producer that dies takes nothing with it that it had already
put out. The generators are never retried by Ray: sampling is not repeatable from the middle. What the edge holds lies
in its journal too, so that its own death loses nothing: Ray starts it again, `begin` refills it, `pull` goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
import time
import traceback
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from rollstream.graphs.edge import EdgeQueue
from rollstream.graphs.edge_metrics import EdgeMetrics
from rollstream.graphs.fetch import fetch
from rollstream.graphs.item import Failure, Item, Left, Part
from rollstream.graphs.journal import SEGMENT_BYTES, Journal
from rollstream.graphs.recording import Recorder
from rollstream.graphs.stats import EdgeStats, Whereabouts
from rollstream.stages.errors import PluginError, ProcessDied, RollstreamError, StageError

#: Groups that a producer may be ahead of the edge.
GENERATOR_AHEAD = 2
STORE_HINT = (
    "\nRay has no room for what this stage puts out: lower Bounds.max_bytes or the size of a group, start Ray with a "
    "larger --object-store-memory, or make room on the disk that it spills to."
)
#: While there is no room, what the producers hold is renewed so often.
RENEW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EdgeSettings:
    """What an edge is made with, and made again with after its death."""

    name: str
    producer: str
    consumers: tuple[str, ...]
    num_producers: int
    max_groups: int
    max_bytes: int
    lease_s: float
    needed: int
    max_deaths: int
    folder: Path  # the run's
    journal: bool = True
    record: Mapping[str, str] | None = None  # what the recording says of itself


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


class PeerDied(Exception):
    """A rank of a replica died while the others worked with it: the replica is as good as dead."""


class EdgeActor:
    """Async actor around an `EdgeQueue`."""

    def __init__(self, settings: EdgeSettings):
        self._settings = settings
        self._queue = EdgeQueue(
            settings.name,
            settings.consumers,
            max_groups=settings.max_groups,
            max_bytes=settings.max_bytes,
            lease_s=settings.lease_s,
            clock=time.monotonic,
            needed=settings.needed,
            max_deaths=settings.max_deaths,
        )
        self._journal: Journal | None = None
        self._recorder: Recorder | None = None
        if settings.record is not None:
            self._recorder = Recorder(settings.folder / "recorded" / f"{settings.producer}.arrows", settings.record)
        self._edges: Mapping[str, Any] = {}  # all of the graph's, by producer
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._holders: dict[int, str] = {}  # replica -> the pull that counts
        self._ended: set[int] = set()
        self._begun = self._opened = False
        self._metrics = EdgeMetrics(settings.name)

    # Life --------------------------------------------------------------------------------------------------------

    async def stay(self) -> None:
        """Never answers: its error is how the runner learns of this actor's death."""
        await asyncio.Event().wait()

    async def begin(
        self, edges: Mapping[str, Any], retired: tuple[int, Collection[int]], version: int, below: int | None = None
    ) -> dict[int, str]:
        """Refills from the journal; births by order of what is here then. Left out is what is retired, or was made by
        weights newer than `version`, or is not admitted, being of an order that is not below `below`: these are of a
        run that went on after its checkpoint and was lost, and are made again. Called once after each start; then come
        `keep` and `mark`, then `open`. Raises CheckpointError where the journal can't be read."""
        self._begun = True
        self._edges = edges
        frontier, ahead = retired
        self._queue.retire([*ahead])
        self._queue.retire_below(frontier)
        if self._settings.journal:
            folder = self._settings.folder / "journal" / self._settings.producer
            self._journal = Journal(folder, spare_segments=_spare_segments(self._settings))
            stale: list[int] = []
            for head, batch in self._journal.refill():
                item = Item.from_json(head)
                if self._queue.item(item.order) is not None:
                    continue  # asked twice: the first answer was lost
                late = below is not None and item.order >= below
                if self._queue.knows(item.order) or max(item.version, item.newest_version) > version or late:
                    stale.append(item.order)
                    continue
                self._queue.put(_owned(item, ray.put((item, batch))))
            self._journal.drop(stale)
        return self._queue.held()

    async def keep(self, births: Mapping[int, str]) -> dict[int, str]:
        """Of what was refilled, keeps the groups whose rows are those that the edge before has; the rest is made
        again."""
        lost = [order for order, birth in self._queue.held().items() if births.get(order) != birth]
        self._queue.lose(lost)
        if self._journal is not None:
            self._journal.drop(lost)
        return self._queue.held()

    async def open(self) -> None:
        """From here on consumers get groups. Raises ProcessDied where this is not the process that has begun."""
        if not self._begun:
            raise ProcessDied(self._settings.producer, "", f"the edge {self._settings.name} died while it began")
        self._opened = True
        await self._notify()

    async def is_open(self) -> bool:
        """False in a process that is new."""
        return self._opened

    async def held(self) -> dict[int, str]:
        return self._queue.held()

    async def mark(self, consumer: str, done: Collection[int]) -> None:
        self._queue.mark(consumer, done)
        await self._notify()

    # Producers ---------------------------------------------------------------------------------------------------

    async def pull(self, replica: int, producer: Any, holder: str, inlet: Any) -> None:
        """Pulls one replica of the stage before until its stream ends. The edge ends with the last of them, or at once
        with the first error; a replica that dies ends nothing: it will be started again, and pulled again."""
        self._holders[replica] = holder
        self._ended.discard(replica)
        try:
            await self._pull(producer, holder, inlet)
        except Exception as error:  # noqa: BLE001 - the process boundary: carried on, down the edge
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(error, RayActorError) or isinstance(cause, PeerDied):
                return
            self._queue.fail(as_failure(error, self._settings.producer))
        else:
            if self._holders[replica] != holder:
                return
            self._ended.add(replica)
            self._queue.closed = len(self._ended) == self._settings.num_producers
        await self._notify()

    async def _pull(self, producer: Any, holder: str, inlet: Any) -> None:
        stream = producer.produce.options(
            num_returns="streaming", _generator_backpressure_num_objects=GENERATOR_AHEAD
        ).remote(holder, self._queue.known())
        while True:
            await self._room(holder, inlet)
            ref = await anext(stream, None)
            if ref is None:
                return
            item, batch = await ref
            await self._take_in(item, batch, ref)
            if inlet is not None:
                inlet.ack.remote(self._settings.producer, [item.order])
            del item, batch, ref  # they would keep the object until the next one comes
            await self._notify()

    async def _take_in(self, item: Item, batch: pa.RecordBatch, ref: Any) -> None:
        """The group is here, and in the journal, unless it was here before."""
        async with self._writing:
            if self._queue.knows(item.order):
                return
            if item.filtered:
                self._queue.leave(
                    Left(
                        order=item.order,
                        group_id=item.group_id,
                        kind="filtered",
                        stage=self._settings.producer,
                        reason=item.filtered,
                    )
                )
                self._metrics.left()
                return
            item = _owned(item, ref)
            if self._journal is not None or self._recorder is not None:
                await asyncio.to_thread(self._write, item, batch)
            self._queue.put(item)

    def _write(self, item: Item, batch: pa.RecordBatch) -> None:
        """Into the recording and the journal. A full disk is told of; the group goes on without."""
        if self._recorder is not None:
            with self._told("recorded", item):
                self._recorder.add(item.to_json(), fetch(item, self._edges))
        if self._journal is not None:
            with self._told("in the journal", item):
                self._journal.put(item.order, item.to_json(), batch)

    @contextmanager
    def _told(self, what: str, item: Item) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self._metrics.unwritten()
            where = f"{self._settings.name}, {item.group_id}"
            print(f"rollstream: not {what}: {where}: {error}", file=sys.stderr)  # noqa: T201

    async def _room(self, holder: str, inlet: Any) -> None:
        """Waits for room. The time that a producer has for a group does not run meanwhile."""
        begun = time.monotonic()
        renewed = -math.inf
        while not (self._opened and self._queue.has_room()):
            if inlet is not None and time.monotonic() - renewed >= RENEW_S:
                renewed = time.monotonic()
                inlet.renew.remote(self._settings.producer, holder)
            await self._wait(RENEW_S)
        self._metrics.waited_for_room(time.monotonic() - begun)

    # Consumers ---------------------------------------------------------------------------------------------------

    async def lease(
        self,
        consumer: str,
        at_most: int,
        *,
        holder: str,
        at_least: int = 1,
        timeout_s: float = 10.0,
        **how: Any,
    ) -> Lease:
        """Up to `at_most` groups, as EdgeQueue.lease gives them; waits up to `timeout_s` for `at_least`, then gives
        what there is."""
        begun = time.monotonic()
        while True:
            if self._queue.failure is not None:
                return Lease(ended=True, failure=self._queue.failure)
            items: Sequence[Item] = ()
            drained = ended = False
            waited_s = time.monotonic() - begun
            if self._opened and (waited_s >= timeout_s or self._queue.can_give(consumer, at_least)):
                items = self._queue.lease(consumer, at_most, holder=holder, **how)
            if self._opened:
                drained, ended = self._queue.drained(consumer), self._queue.ended(consumer, holder)
            if items or ended or waited_s >= timeout_s:
                self._metrics.waited_for_lease(waited_s)
                return Lease(items=tuple(items), drained=drained, ended=ended)
            await self._wait(min(timeout_s - waited_s, 1.0))

    async def expect(self, consumer: str, holder: str) -> None:
        self._queue.expect(consumer, holder)

    async def ack(self, consumer: str, orders: Sequence[int]) -> None:
        self._queue.ack(consumer, orders)
        await self._notify()

    async def renew(self, consumer: str, holder: str) -> None:
        self._queue.renew(consumer, holder)

    async def retire(self, orders: Sequence[int]) -> None:
        self._queue.retire(orders)
        await self._notify()
        async with self._writing:  # one of them may be on its way into the journal
            if self._journal is not None:
                self._journal.drop(orders)

    async def admit(self, consumer: str, below: int) -> None:
        self._queue.admit(consumer, below)
        await self._notify()

    async def release(self, consumer: str, holder: str, died: str) -> None:
        """Takes back what a holder has."""
        await self._set_aside(self._queue.release(consumer, holder, died=died))
        await self._notify()

    async def _set_aside(self, aside: Sequence[Left]) -> None:
        """Groups that took their holders down too often go to disk, with their rows and why."""
        items = [self._queue.item(left.order) for left in aside]  # which may be retired while one is fetched
        for left, item in zip(aside, items, strict=True):
            assert item is not None, f"group {left.order} is set aside, and not here"
            try:
                group = await asyncio.to_thread(fetch, item, self._edges)
            except RollstreamError:  # its rows died with another process; the reason is kept all the same
                group = None
            try:
                quarantine(self._settings.folder / "quarantine", left, item, group)
            except OSError as error:
                print(f"rollstream: {left.group_id} is not in quarantine/: {error}", file=sys.stderr)  # noqa: T201
            self._metrics.left()

    async def part(self, order: int, birth: str) -> Part | None:
        """A group's columns; None where this edge does not have them (yet)."""
        item = self._queue.item(order)
        return item.parts[-1] if item is not None and item.birth == birth else None

    async def stats(self) -> EdgeStats:
        """The edge as it is, once leases that ran out are taken back."""
        await self._set_aside(self._queue.expire())
        await self._notify()
        stats = self._queue.stats()
        self._metrics.tell(stats)
        return stats

    async def whereabouts(self) -> list[Whereabouts]:
        return self._queue.whereabouts()

    # -------------------------------------------------------------------------------------------------------------

    async def _wait(self, timeout_s: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _spare_segments(settings: EdgeSettings) -> int:
    """As many as a full edge frees: a step retires many groups at once, and the next ones must not find a cold file."""
    return 2 + settings.max_bytes // SEGMENT_BYTES


def _owned(item: Item, ref: Any) -> Item:
    """The item with the last of its parts being this object."""
    return dataclasses.replace(item, parts=(*item.parts[:-1], dataclasses.replace(item.parts[-1], ref=ref)))


def quarantine(folder: Path, left: Left, item: Item, group: pa.RecordBatch | None) -> None:
    """Keeps a group that was set aside: its rows as ORDER.arrow, and why as ORDER.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if group is not None:
        with pa.OSFile(str(folder / f"{left.order}.arrow"), "wb") as file, pa.ipc.new_file(file, group.schema) as out:
            out.write_batch(group)
    text = json.dumps({**dataclasses.asdict(left), "item": item.to_json()}, indent=1)
    (folder / f"{left.order}.json").write_text(text)


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
        hint = STORE_HINT if isinstance(cause, ObjectStoreFullError | OutOfDiskError) else ""
        return Failure(stage=stage, subject="", cause=f"{type(error).__name__}: {error}{hint}")
    return Failure(stage=stage, subject="", cause="".join(traceback.format_exception(error)))
