"""The Ray actor that a stage runs in: one for each rank of each replica.

    source / map / rollout   rank 0's `produce` leases, works, puts out; its peers are called with the same group
    update                   all ranks `take` their shares and `update`; feed.py calls them

What was leased is acked by the edge behind, once what came of it is safe there. One thread works (the default group),
one answers `stats` while it does, one reads the next step's groups, one waits for a checkpoint to be written, one shows
that the process lives.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import ray

from rollstream.graphs.edge_actor import Lease, PeerDied, UpstreamFailed
from rollstream.graphs.fetch import fetch, fetch_all
from rollstream.graphs.item import Item, Leg, Part
from rollstream.graphs.rollout_loop import CALL_S, RolloutLoop, Turn
from rollstream.graphs.stats import StageStats
from rollstream.graphs.wait import ask, get_all
from rollstream.graphs.weights import bucketed
from rollstream.stages.base import Filtered, MapStage, Metric, RolloutStage, Source, Stage, UpdateStage, World
from rollstream.stages.errors import EngineDied, ProcessDied, StageError
from rollstream.stages.schema import compact, join_columns, num_tokens

T = TypeVar("T")
#: What the edge behind a stage gets of each group.
Produced = tuple[Item, pa.RecordBatch | None]


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a host is connected to. Made by the runner once all actors are up."""

    inlet: Any = None  # the edge that it consumes
    edges: Mapping[str, Any] = field(default_factory=lambda: {})  # all of the graph's, by producer
    weights: Any = None  # the weight store, for a rollout stage
    peers: tuple[Any, ...] = ()  # the other ranks of its replica


class StageHost:
    """Runs one rank of one stage."""

    def __init__(self, stage: Stage[Any, Any], world: World):
        self._stage = stage
        self._links = Links()
        self._set_up = False
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._working: tuple[str, float] | None = None
        self._loop: RolloutLoop | None = None  # of a rollout stage, as is its turn
        self._turn = Turn()
        self._shares: dict[int, Future[list[pa.RecordBatch]]] = {}  # by step: of the one that goes on, and of the next
        threads = (world.threads or max((os.cpu_count() or 1) // world.size, 1)) if stage.uses_device else 1
        self._world = dataclasses.replace(world, threads=threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray says 1; math libraries read it when they are first loaded

    # Life -------------------------------------------------------------------------------------------------------

    def address(self) -> tuple[str, int]:
        """Where rank 0 of this replica can listen: this node's address and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def whereabouts(self) -> tuple[str, tuple[str, ...]]:
        """This process's node and GPUs."""
        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ()))

    @ray.method(concurrency_group="control")
    def is_set_up(self) -> bool:
        """False in a process that is new."""
        return self._set_up

    def setup(self, address: str, port: int) -> None:
        world = dataclasses.replace(self._world, address=address, port=port)
        self._work("set-up", lambda: self._stage.setup(world))
        self._set_up = True

    def connect(self, links: Links) -> None:
        self._links = links

    @ray.method(concurrency_group="control")
    def stats(self) -> StageStats:
        working = self._working
        now = time.monotonic()
        busy_s = self._busy_s + (now - working[1] if working else 0.0)
        return StageStats(
            name=self._stage.name,
            busy_s=busy_s,
            wait_s=now - self._started - busy_s,
            working_on=working[0] if working else "",
            working_s=now - working[1] if working else 0.0,
        )

    @ray.method(concurrency_group="life")
    def stay(self) -> None:
        """Never answers: its error is how the runner learns of this actor's death."""
        threading.Event().wait()

    # Streaming stages -------------------------------------------------------------------------------------------

    def produce(self, holder: str, known: tuple[int, frozenset[int]]) -> Iterator[Produced]:
        """This stage's output for the edge that calls it: an Item and the columns that the stage adds, and so on.

        `holder` names this call in the leases of the edge before. `known` are the groups that the calling edge has or
        had: those below the number, and these.
        """
        stage = self._stage
        if not self._links.edges:
            raise PeerDied(f"this process of {stage.name} is new: it is pulled once it is loaded")
        if isinstance(stage, Source):
            yield from self._produce_source(stage, known)
        elif isinstance(stage, RolloutStage):
            yield from self._produce_rollouts(stage, holder)
        else:
            assert isinstance(stage, MapStage)
            yield from self._produce_mapped(stage, holder)

    def process(self, item: Item) -> None:
        """A peer's share in rank 0's work on one group."""
        stage = self._stage
        assert isinstance(stage, MapStage)
        group = self._fetch(item)
        self._work(item.group_id, lambda: stage.run(group))

    def _produce_source(self, source: Source[Any], known: tuple[int, frozenset[int]]) -> Iterator[Produced]:
        start, skip = known
        rows = source.rows(skip, start)
        begun = time.time()
        while (group := self._work("rows", lambda: next(rows, None))) is not None:
            yield self._head(group, version=0, begun=begun), compact(group)
            begun = time.time()

    def _produce_mapped(self, stage: MapStage[Any, Any], holder: str) -> Iterator[Produced]:
        for items in self._leases(holder, at_most=1):
            for item in items:
                begun = time.time()
                helping = [peer.process.remote(item) for peer in self._links.peers]
                group = self._fetch(item)
                part = self._work(item.group_id, lambda group=group: stage.run(group))
                self._wait_for_peers(helping, item)
                yield self._mapped(item, part, begun), compact(part) if isinstance(part, pa.RecordBatch) else None

    def _wait_for_peers(self, helping: Sequence[Any], item: Item) -> None:
        try:
            get_all(helping, f"the ranks of {self._stage.name} on {item.group_id}", timeout_s=CALL_S)
        except ProcessDied as error:
            raise PeerDied(str(error)) from None

    def _mapped(self, item: Item, part: pa.RecordBatch | Filtered, begun: float) -> Item:
        """The group's head behind this stage."""
        if isinstance(part, Filtered):
            return dataclasses.replace(item, filtered=part.reason)
        own = Part(edge=self._stage.name, nbytes=part.nbytes)
        return dataclasses.replace(
            item,
            parts=(*item.parts, own),
            metrics={**item.metrics, **self._stage.metrics.take()},
            trail=(*item.trail, self._leg(begun)),
        )

    def _produce_rollouts(self, stage: RolloutStage[Any, Any], holder: str) -> Iterator[Produced]:
        if self._loop is None:
            inlet, store = self._links.inlet, self._links.weights
            self._loop = RolloutLoop(stage, inlet=inlet, store=store, fetch=self._fetch, turn=self._turn)
        loop = self._loop
        loop.attach(holder)
        try:
            while not loop.ended:
                loop.lease()
                if not loop.busy:
                    continue
                self._work(loop.task, loop.begin, since=loop.since)
                while (done := self._work(loop.task, loop.take, since=loop.since)) is not None:
                    item, group, begun = done
                    head = self._head(group, version=item.version, begun=begun)
                    trail = (*item.trail, *head.trail)
                    yield dataclasses.replace(head, trail=trail, newest_version=item.newest_version), compact(group)
        except EngineDied as error:
            self._end_with(str(error))
            raise PeerDied(str(error)) from None

    def _leases(self, holder: str, at_most: int, *, fill: bool = False) -> Iterator[tuple[Item, ...]]:
        name = self._stage.name
        while True:
            lease: Lease = ask(
                lambda: self._links.inlet.lease.remote(name, at_most, holder=holder, fill=fill),
                f"the edge before {name}",
                timeout_s=CALL_S,
            )
            if lease.failure is not None:
                raise UpstreamFailed(lease.failure)
            if lease.ended:
                return
            if lease.items:
                yield lease.items

    def _head(self, group: pa.RecordBatch, *, version: int, begun: float) -> Item:
        return Item(
            group_id=group.column("group_id")[0].as_py(),
            order=group.column("order")[0].as_py(),
            version=version,
            birth=uuid.uuid4().hex[:16],
            num_rows=group.num_rows,
            num_tokens=num_tokens(group),
            parts=(Part(edge=self._stage.name, nbytes=group.nbytes),),
            metrics=self._stage.metrics.take(),
            trail=(self._leg(begun),),
        )

    def _leg(self, begun: float) -> Leg:
        return Leg(stage=self._stage.name, begun=begun, seconds=time.time() - begun)

    def _fetch(self, item: Item) -> pa.RecordBatch:
        return fetch(item, self._links.edges)

    @ray.method(concurrency_group="control")
    def rest(self) -> None:
        """A rollout stage gives the device back, and begins nothing until `wake`."""
        stage = self._stage
        assert isinstance(stage, RolloutStage)
        try:
            self._carry("rest", lambda: self._turn.end(stage, lambda: bool(self._loop and self._loop.is_at_work)))
        except EngineDied as error:
            self._end_with(str(error))

    @ray.method(concurrency_group="control")
    def wake(self) -> None:
        self._turn.begin()

    @ray.method(concurrency_group="control")
    def quit(self) -> None:
        """A rollout stage gives the device back for good, whatever it is at."""
        stage = self._stage
        assert isinstance(stage, RolloutStage)
        self._carry("quit", lambda: self._turn.quit(stage))

    # Update stages ----------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="feed")
    def take(self, step: int, groups: Sequence[Sequence[Item]]) -> None:
        """This rank's share of a step, ahead of its `update`; another step may still go on. Each group is given as one
        item for each input stream."""
        given = self._share(step)
        try:
            found = iter(fetch_all([item for streams in groups for item in streams], self._links.edges))
            given.set_result([join_columns([next(found) for _ in streams]) for streams in groups])
        except BaseException as error:  # noqa: BLE001 - it is the step's
            given.set_exception(error)

    def update(self, step: int) -> Mapping[str, Metric]:
        """One step on the share that `take` brings."""
        stage = self._updater

        def train() -> Mapping[str, Metric]:
            try:
                groups = self._share(step).result(timeout=CALL_S)
            except FutureTimeout:
                why = (
                    f"This rank's groups were not read in {CALL_S:g} s: the edges before it do not give their columns."
                )
                raise StageError(stage.name, f"step {step}", why) from None
            return stage.update(groups)

        try:
            return self._work(f"step {step}", train)
        finally:
            self._shares.pop(step, None)

    def _share(self, step: int) -> Future[list[pa.RecordBatch]]:
        return self._shares.setdefault(step, Future())

    def publish(self, store: Any, version: int, *, shared: bool, arrays: bool) -> None:
        """Sends the weights to the store as `version`, in one way or both; collective, rank 0 puts them out."""
        stage = self._updater

        def send() -> None:
            kept = stage.share_weights(version) if shared else None
            buckets = [ray.put(bucket) for bucket in bucketed(stage.weights())] if arrays else []
            if self._world.rank == 0:
                ask(lambda: store.publish.remote(version, buckets, kept), "the weight store", timeout_s=CALL_S)

        self._work(f"weights {version}", send)
        self._work("rest", stage.rest)

    def save(self, folder: Path) -> None:
        self._work("checkpoint", lambda: self._updater.save(folder))
        self._work("rest", self._updater.rest)

    @ray.method(concurrency_group="saving")
    def finish_save(self) -> None:
        """Waits for what `save` began. In a thread of its own, while the stage works: touches nothing else."""
        self._carry("checkpoint", lambda: self._updater.finish_save())

    def load(self, folder: Path) -> None:
        self._work("checkpoint", lambda: self._updater.load(folder))

    def export(self, folder: Path) -> None:
        self._work("export", lambda: self._updater.export(folder))

    @property
    def _updater(self) -> UpdateStage[Any, Any]:
        assert isinstance(self._stage, UpdateStage)
        return self._stage

    # ------------------------------------------------------------------------------------------------------------

    def _end_with(self, why: str) -> None:
        """The engine is gone and all it had with it: so is this process, soon. Ray starts it again."""
        print(f"rollstream: stage {self._stage.name}: {why}: its process is started again", file=sys.stderr)  # noqa: T201
        self._stage.close()
        threading.Timer(1.0, os._exit, [1]).start()  # the caller hears of it before

    def _work(self, subject: str, do: Callable[[], T], *, since: float | None = None) -> T:
        """Does it, timed; an error goes on as a StageError with its own traceback. `since` says when the work began,
        where this is a part of it."""
        begun = time.monotonic()
        self._working = (subject, begun if since is None else since)
        try:
            return self._carry(subject, do)
        finally:
            self._busy_s += time.monotonic() - begun
            self._working = None

    def _carry(self, subject: str, do: Callable[[], T]) -> T:
        try:
            return do()
        except (StageError, EngineDied, UpstreamFailed):
            raise
        except BaseException as error:  # noqa: BLE001 - the process boundary: carried on, whole
            raise StageError(self._stage.name, subject, "".join(traceback.format_exception(error))) from None
