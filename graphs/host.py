"""The Ray actor that a stage runs in: one for each rank of each replica.

    source / map / rollout   rank 0's `produce` leases, works, puts out, acks; its peers are called with the same group
    update                   the runner calls `update` on all ranks with their shares

One thread works ("work", the default group); another answers `stats` while it does.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import ray

from rollstream.graphs.edge import Item
from rollstream.graphs.edge_actor import UpstreamFailed
from rollstream.graphs.stats import StageStats
from rollstream.graphs.wait import get, get_all
from rollstream.graphs.weights import Published, bucketed
from rollstream.stages.base import MapStage, Metric, RolloutStage, Source, Stage, UpdateStage, World
from rollstream.stages.errors import StageError
from rollstream.stages.schema import compact, join_columns

T = TypeVar("T")

#: How long one object or one call between actors may take.
CALL_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a host is connected to. Made by the runner once all actors are up."""

    inlet: Any = None  # the edge that it consumes
    weights: Any = None  # the weight store, for a rollout stage
    peers: tuple[Any, ...] = ()  # the other ranks of its replica
    skip: frozenset[int] = frozenset()  # source: positions already trained
    start: int = 0  # source: the first position


class StageHost:
    """Runs one rank of one stage."""

    def __init__(self, stage: Stage[Any, Any], world: World):
        self._stage = stage
        self._links = Links()
        self._version = -1
        self._started = time.monotonic()
        self._busy_s = 0.0
        self._working: tuple[str, float] | None = None
        threads = (world.threads or max((os.cpu_count() or 1) // world.size, 1)) if stage.uses_device else 1
        self._world = dataclasses.replace(world, threads=threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray says 1; math libraries read it when they are first loaded

    # Life -------------------------------------------------------------------------------------------------------

    def address(self) -> tuple[str, int]:
        """Where rank 0 of this replica can listen: this node's address and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def setup(self, address: str, port: int) -> None:
        world = dataclasses.replace(self._world, address=address, port=port)
        self._work("set-up", lambda: self._stage.setup(world))

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

    # Streaming stages -------------------------------------------------------------------------------------------

    def produce(self) -> Iterator[Item | pa.RecordBatch]:
        """This stage's output for the edge that calls it: a RecordBatch that it adds, then the Item, and so on."""
        stage = self._stage
        if isinstance(stage, Source):
            yield from self._produce_source(stage)
        elif isinstance(stage, RolloutStage):
            yield from self._produce_rollouts(stage)
        else:
            assert isinstance(stage, MapStage)
            yield from self._produce_mapped(stage)

    def process(self, group_id: str, parts: Sequence[Any]) -> None:
        """A peer's share in rank 0's work on one group."""
        stage = self._stage
        assert isinstance(stage, MapStage)
        group = self._fetch(parts)
        self._work(group_id, lambda: stage.run(group))

    def _produce_source(self, source: Source[Any]) -> Iterator[Item | pa.RecordBatch]:
        rows = source.rows(self._links.skip, self._links.start)
        while (group := self._work("rows", lambda: next(rows, None))) is not None:
            yield compact(group)
            yield self._head(group, version=0)

    def _produce_mapped(self, stage: MapStage[Any, Any]) -> Iterator[Item | pa.RecordBatch]:
        for items in self._leases(at_most=1):
            for item in items:
                helping = [peer.process.remote(item.group_id, item.parts) for peer in self._links.peers]
                group = self._fetch(item.parts)
                part = self._work(item.group_id, lambda group=group: stage.run(group))
                get_all(helping, f"the ranks of {stage.name} on {item.group_id}", timeout_s=CALL_S)
                yield compact(part)
                yield Item(
                    group_id=item.group_id,
                    order=item.order,
                    version=item.version,
                    parts=item.parts,
                    nbytes=item.nbytes + part.nbytes,
                    num_rows=item.num_rows,
                    metrics={**item.metrics, **stage.metrics.take()},
                )
                self._ack(item)

    def _produce_rollouts(self, stage: RolloutStage[Any, Any]) -> Iterator[Item | pa.RecordBatch]:
        for items in self._leases(at_most=stage.groups_per_batch, fill=True):
            self._take_weights(stage)
            prompts = [self._fetch(item.parts) for item in items]
            by_group = {item.group_id: item for item in items}
            samples = stage.run(prompts)
            what = ", ".join(by_group)
            while (group := self._work(what, lambda samples=samples: next(samples, None))) is not None:
                head = self._head(group, version=self._version)
                item = by_group.pop(head.group_id, None)
                if item is None:
                    raise StageError(stage.name, head.group_id, "It put out this group twice, or was never given it.")
                yield compact(group)
                yield head
                self._ack(item)
            if by_group:
                raise StageError(stage.name, ", ".join(by_group), "It ended without samples for these groups.")

    def _take_weights(self, stage: RolloutStage[Any, Any]) -> None:
        """The newest weights, if they are newer than those that the engine has."""
        newest: Published = get(self._links.weights.latest.remote(), "the weight store", timeout_s=CALL_S)
        if newest.version == self._version:
            return
        buckets = get_all(newest.buckets, f"weights of version {newest.version}", timeout_s=CALL_S)
        tensors = [pair for bucket in buckets for pair in bucket]
        self._work(f"weights {newest.version}", lambda: stage.load_weights(newest.version, tensors))
        self._version = newest.version

    def _leases(self, at_most: int, *, fill: bool = False) -> Iterator[tuple[Item, ...]]:
        while True:
            lease = get(
                self._links.inlet.lease.remote(self._stage.name, at_most, fill=fill),
                f"the edge before {self._stage.name}",
                timeout_s=CALL_S,
            )
            if lease.failure is not None:
                raise UpstreamFailed(lease.failure)
            if lease.ended:
                return
            if lease.items:
                yield lease.items

    def _ack(self, item: Item) -> None:
        """After what came of the group is in the edge behind: that edge owns it. Not waited for."""
        self._links.inlet.ack.remote(self._stage.name, [item.group_id])

    def _head(self, group: pa.RecordBatch, *, version: int) -> Item:
        return Item(
            group_id=group.column("group_id")[0].as_py(),
            order=group.column("order")[0].as_py(),
            version=version,
            parts=(),
            nbytes=group.nbytes,
            num_rows=group.num_rows,
            metrics=self._stage.metrics.take(),
        )

    def _fetch(self, parts: Sequence[Any]) -> pa.RecordBatch:
        return join_columns(get_all(list(parts), f"a group's columns for {self._stage.name}", timeout_s=CALL_S))

    # Update stages ----------------------------------------------------------------------------------------------

    def update(self, step: int, groups: Sequence[Sequence[Sequence[Any]]]) -> Mapping[str, Metric]:
        """One step on this rank's share. Each group is given as one list of parts for each input stream."""
        stage = self._updater
        batches = [join_columns([self._fetch(parts) for parts in streams]) for streams in groups]
        return self._work(f"step {step}", lambda: stage.update(batches))

    def publish(self, store: Any, version: int) -> None:
        """Sends the weights to the store as `version`; collective, rank 0 puts them out."""
        stage = self._updater

        def send() -> None:
            buckets = [ray.put(bucket) for bucket in bucketed(stage.weights())]
            if self._world.rank == 0:
                get(store.publish.remote(version, buckets), "the weight store", timeout_s=CALL_S)

        self._work(f"weights {version}", send)

    def save(self, folder: Path) -> None:
        self._work("checkpoint", lambda: self._updater.save(folder))

    def load(self, folder: Path) -> None:
        self._work("checkpoint", lambda: self._updater.load(folder))

    def export(self, folder: Path) -> None:
        self._work("export", lambda: self._updater.export(folder))

    @property
    def _updater(self) -> UpdateStage[Any, Any]:
        assert isinstance(self._stage, UpdateStage)
        return self._stage

    # ------------------------------------------------------------------------------------------------------------

    def _work(self, subject: str, do: Callable[[], T]) -> T:
        """Does it, timed; an error goes on as a StageError with its own traceback."""
        self._working = (subject, time.monotonic())
        try:
            return do()
        except StageError:
            raise
        except Exception as error:  # noqa: BLE001 - the process boundary: carried on, whole
            raise StageError(self._stage.name, subject, "".join(traceback.format_exception(error))) from None
        finally:
            self._busy_s += time.monotonic() - self._working[1]
            self._working = None
