"""What a rollout stage's process does over and over: takes groups, begins them, takes weights, gives groups out.

    lease    groups from the edge before, as many as there is room for; they wait until they are begun
    begin    the newest weights first, for what waits was admitted for them; then all that waits
    take     what has ended

A stage that is not continuous has nothing under way when it takes weights or groups. One that is takes groups as others
end; new weights it takes at once where it can do so in flight, else it begins no more until all have ended.

The edge behind calls the process, and again after its own death: Ray breaks the old call off. The loop stays: what is
under way goes to the new call, and what the edge before gives again of it is not begun again.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayActorError

from rollstream.graphs.edge_actor import Lease, UpstreamFailed
from rollstream.graphs.item import Item
from rollstream.graphs.wait import AGAIN_S, ask, get, get_all
from rollstream.graphs.weights import Published
from rollstream.stages.base import RolloutStage
from rollstream.stages.errors import StageError, StalledError

#: How long one object or one call between actors may take.
CALL_S = 600.0
#: A call that waits for groups or weights comes back empty after so long.
LEASE_S, WEIGHTS_S = 10.0, 60.0
#: With groups under way: a lease call tells the edge what they are, so it must not be old; and how long to wait for one
#: to end before looking for others.
BUSY_LEASE_S, TAKE_S = 0.5, 0.02


class Turn:
    """Whether the stage may have the device; others take it from another thread, while nothing is under way."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.resting = False
        self.rests = 0  # so far: with each, the stage's weights may be gone

    def end(self, stage: RolloutStage[Any, Any], is_busy: Callable[[], bool]) -> None:
        """Lets nothing begin, waits for what is under way, and has the stage rest."""
        self.resting = True
        give_up = time.monotonic() + CALL_S
        while True:
            with self.lock:
                if not is_busy():
                    self.rests += 1
                    stage.rest()
                    return
            if time.monotonic() > give_up:
                raise StalledError(f"{stage.name}: groups were under way for {CALL_S:g} s when it was to rest")
            time.sleep(TAKE_S)

    def begin(self) -> None:
        self.resting = False

    def quit(self, stage: RolloutStage[Any, Any]) -> None:
        """For good: lets nothing begin, and gives up what is under way."""
        self.resting = True
        with self.lock:
            stage.close()


@dataclass(frozen=True, kw_only=True)
class _Begun:
    item: Item  # with the version of the weights that began it
    at: float  # by the clock
    since: float  # by time.monotonic


class RolloutLoop:
    """Of one process. `inlet` is the edge before it, `store` the weight store if any, `fetch` brings an item's rows."""

    def __init__(
        self,
        stage: RolloutStage[Any, Any],
        *,
        inlet: Any,
        store: Any,
        fetch: Callable[[Item], pa.RecordBatch],
        turn: Turn,
    ):
        self._stage, self._inlet, self._store, self._fetch, self._turn = stage, inlet, store, fetch, turn
        self._rests = 0
        self._holder = ""
        self.ended = False
        self._version = 0 if store is None else -1
        self._newest: Published | None = None
        self._waiting: list[Item] = []
        self._flying: dict[str, _Begun] = {}
        self._drained = False
        self._lease_call: Any = None
        self._weights_call: Any = None

    def attach(self, holder: str) -> None:
        """Another call goes on with it, under this name in leases."""
        self._holder = holder
        self._waiting.clear()  # the edge before gives them again
        self._lease_call = None
        self._drained = self.ended = False

    @property
    def busy(self) -> bool:
        """Whether groups are under way or wait to be."""
        return bool(self._flying or self._waiting)

    @property
    def is_at_work(self) -> bool:
        """Whether groups are under way."""
        return bool(self._flying)

    @property
    def task(self) -> str:
        """What it is at work on, the oldest first, for people."""
        if self._flying:
            return ", ".join(self._flying) if len(self._flying) < 4 else f"{len(self._flying)} groups"
        return ", ".join(item.group_id for item in self._waiting)

    @property
    def since(self) -> float | None:
        """When the oldest that is under way was begun, by time.monotonic."""
        oldest = next(iter(self._flying.values()), None)
        return oldest and oldest.since

    def lease(self) -> None:
        """Takes groups in where there is room; waits for some where there is nothing else to do."""
        room = self._stage.groups_in_flight - len(self._flying) - len(self._waiting)
        if self._drained or room <= 0 or (self.busy and not self._stage.continuous):
            return
        if self._lease_call is None:
            self._lease_call = self._ask_for(room)
        done, _ = ray.wait([self._lease_call], timeout=0 if self.busy else LEASE_S + AGAIN_S)
        if not done:
            return
        call, self._lease_call = self._lease_call, None
        try:
            lease: Lease = ray.get(call, timeout=1)
        except RayActorError:  # the edge is being started again
            time.sleep(AGAIN_S)
            return
        if lease.failure is not None:
            raise UpstreamFailed(lease.failure)
        mine = {*self._flying, *(item.group_id for item in self._waiting)}
        self._waiting += [
            item for item in lease.items if item.group_id not in mine
        ]  # an edge that died gives them again
        if lease.items and self._store is not None:
            self._newest = self._latest()
        self._drained = lease.ended
        self.ended = lease.ended and not self.busy

    def begin(self) -> None:
        """Takes newer weights, if it may, and begins all that waits for them; nothing while the stage rests."""
        with self._turn.lock:
            if not self._turn.resting:
                if self._turn.rests != self._rests:
                    self._rests, self._version = self._turn.rests, -1
                self._begin()
                return
        time.sleep(TAKE_S)

    def _begin(self) -> None:
        self._look_for_weights()
        newest = self._newest
        if newest is not None and newest.version > self._version:
            if self._flying and not self._stage.updates_in_flight:
                return
            self._load(newest)
        while self._waiting:
            item = self._waiting[0]
            self._stage.submit(self._fetch(item))
            del self._waiting[0]
            begun = dataclasses.replace(item, version=self._version)
            self._flying[item.group_id] = _Begun(item=begun, at=time.time(), since=time.monotonic())

    def take(self) -> tuple[Item, pa.RecordBatch, float] | None:
        """A group that has ended: what it came from, its rows, and when it was begun; None where there is none yet."""
        if not self._flying:
            return None
        group = self._stage.take(TAKE_S)
        if group is None:
            if not self._stage.continuous:
                missing = ", ".join(self._flying)
                raise StageError(self._stage.name, missing, "It ended without samples for these groups.")
            return None
        group_id = group.column("group_id")[0].as_py()
        begun = self._flying.pop(group_id, None)
        if begun is None:
            raise StageError(self._stage.name, group_id, "It put out this group twice, or was never given it.")
        self.ended = self._drained and not self.busy
        versions = group.column("weight_version").flatten()
        newest = pc.max(versions).as_py() if len(versions) else begun.item.version  # pyright: ignore[reportAttributeAccessIssue]
        return dataclasses.replace(begun.item, newest_version=newest), group, begun.at

    # ------------------------------------------------------------------------------------------------------------

    def _ask_for(self, room: int) -> Any:
        continuous = self._stage.continuous
        return self._inlet.lease.remote(
            self._stage.name,
            room,
            holder=self._holder,
            holding=[begun.item.order for begun in self._flying.values()],
            fill=not continuous,
            share=continuous,
            timeout_s=BUSY_LEASE_S if self.busy else LEASE_S,
        )

    def _latest(self) -> Published:
        return ask(lambda: self._store.latest.remote(), "the weight store", timeout_s=CALL_S)

    def _look_for_weights(self) -> None:
        """Keeps a call open that ends when there are newer ones, where these are taken in flight."""
        if self._store is None or not self._flying or not self._stage.updates_in_flight:
            return
        if self._weights_call is None:
            self._weights_call = self._store.latest.remote(self._version, timeout_s=WEIGHTS_S)
        done, _ = ray.wait([self._weights_call], timeout=0)
        if done:
            call, self._weights_call = self._weights_call, None
            try:
                found: Published | None = get(call, "the weight store", timeout_s=1)
                if found is not None and (self._newest is None or found.version > self._newest.version):
                    self._newest = found  # the answer may be older than what was asked for with the last groups
            except StageError:  # it is being started again, and the weights are published again
                time.sleep(AGAIN_S)

    def _load(self, newest: Published) -> None:
        while newest.shared is not None and not self._stage.load_shared_weights(newest.shared):
            newest = self._newer_than(newest.version)
        if newest.shared is None:
            buckets = get_all(newest.buckets, f"weights of version {newest.version}", timeout_s=CALL_S)
            self._stage.load_weights(newest.version, (pair for bucket in buckets for pair in bucket))
        self._version = newest.version

    def _newer_than(self, version: int) -> Published:
        """What took the place of these weights, once it is whole."""
        found = ask(lambda: self._store.latest.remote(version, timeout_s=CALL_S), "the weight store", timeout_s=CALL_S)
        if found is None:
            raise StalledError(f"weights of version {version} are gone, and no newer ones came in {CALL_S:g} s")
        self._newest = found
        return found
