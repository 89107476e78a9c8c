"""The Arrow queue between stages, without Ray: who holds which group, and what may be taken.

    producer --put--> [ waiting | leased ] --lease / ack--> each consumer, by a cursor of its own

A group stays until every consumer has acked it. A lease that is not acked in time is given out again. `has_room` is
false past the bounds, and then the producers are not pulled: pressure, never a drop. `admit` caps how many groups a
consumer may take in all, which is how staleness is bounded before compute is spent.

    >>> queue = EdgeQueue("a -> b", ["b"], max_groups=2, max_bytes=100, lease_s=60, clock=lambda: 0.0)
    >>> queue.put(Item(group_id="g0", order=0, version=0, parts=(), nbytes=60, num_rows=1, metrics={}))
    True
    >>> [i.group_id for i in queue.lease("b", at_most=8)]
    ['g0']
    >>> queue.ack("b", ["g0"]); queue.stats().groups
    0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.graphs.stats import EdgeStats
from rollstream.stages.base import Metric
from rollstream.stages.errors import WiringError


@dataclass(frozen=True, kw_only=True)
class Item:
    """One group on its way. Made by stage hosts; the rows stay in the object store."""

    group_id: str
    order: int  # position in the run's prompt sequence
    version: int  # weights that began it
    parts: tuple[Any, ...]  # ObjectRefs of RecordBatches whose columns together are the group's
    nbytes: int  # of all parts
    num_rows: int
    metrics: Mapping[str, Metric]  # of all stages so far


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first error of a run, as it travels down the edges."""

    stage: str
    subject: str  # group or sample
    cause: str  # text of the traceback
    plugin: bool = False  # raised by the user's reward function


class EdgeQueue:
    """State of one edge. Times come from `clock`, in seconds. There is room for `min_groups` whatever the bounds: a
    consumer that needs so many at once would wait for ever behind an edge that is full with fewer."""

    def __init__(
        self,
        name: str,
        consumers: Sequence[str],
        *,
        max_groups: int,
        max_bytes: int,
        lease_s: float,
        clock: Callable[[], float],
        min_groups: int = 0,
    ):
        self.name = name
        self.max_groups, self.max_bytes, self.lease_s = max_groups, max_bytes, lease_s
        self.min_groups = min_groups
        self.failure: Failure | None = None
        self.closed = False
        self._clock = clock
        self._items: dict[str, Item] = {}
        self._put_at: dict[str, float] = {}
        self._seen: set[int] = set()
        self._bytes = self._redelivered = 0
        self._cursors = {c: _Cursor() for c in consumers}

    def put(self, item: Item) -> bool:
        """Takes a group in; false if it was here before: a group whose lease ran out may be made twice.

        Raises WiringError where another group that is still here has its id.
        """
        assert not self.closed, f"{self.name} is closed"
        if item.order in self._seen:
            return False
        if (twin := self._items.get(item.group_id)) is not None:
            raise WiringError(
                f"{self.name}: the groups at positions {twin.order} and {item.order} are both called "
                f"{item.group_id!r}; a source must give each group an id of its own"
            )
        self._seen.add(item.order)
        self._items[item.group_id] = item
        self._put_at[item.group_id] = self._clock()
        self._bytes += item.nbytes
        for cursor in self._cursors.values():
            cursor.waiting.append(item.group_id)
        return True

    def has_room(self) -> bool:
        """Whether one more group may be pulled. The bounds may be passed by that one group only, of each producer."""
        held = len(self._items)
        return held < self.min_groups or (held < self.max_groups and self._bytes < self.max_bytes)

    def lease(self, consumer: str, at_most: int, *, fill: bool = False, keep: bool = False) -> list[Item]:
        """Up to `at_most` groups, in order of arrival. With `fill`: all of them, or fewer only where no more can be
        had before the next `admit`, the end, or room; so that how groups fall into leases does not depend on time.
        With `keep` the lease never ends: for a consumer that may hold groups for long and without which there is no
        run."""
        self._expire()
        cursor = self._cursors[consumer]
        most = at_most if cursor.admitted is None else min(at_most, cursor.admitted - cursor.taken)
        if fill and len(cursor.waiting) < most and not self.closed and self.has_room():
            return []
        taken = cursor.waiting[: max(most, 0)]
        del cursor.waiting[: len(taken)]
        for group_id in taken:
            cursor.leased[group_id] = math.inf if keep else self._clock() + self.lease_s
        cursor.taken += len(taken)
        return [self._items[g] for g in taken]

    def ack(self, consumer: str, group_ids: Sequence[str]) -> None:
        """The consumer is done with these groups for good; an ack of a group already acked is ignored. An ack that
        comes after its lease ran out still counts, so that the group is not taken again."""
        cursor = self._cursors[consumer]
        for group_id in group_ids:
            if cursor.leased.pop(group_id, None) is None:
                if group_id not in cursor.waiting:
                    continue
                cursor.waiting.remove(group_id)
                cursor.taken += 1
            if not any(group_id in c.leased or group_id in c.waiting for c in self._cursors.values()):
                self._bytes -= self._items.pop(group_id).nbytes
                del self._put_at[group_id]

    def admit(self, consumer: str, total: int) -> None:
        """From now on `consumer` may have taken up to `total` groups since the start."""
        self._cursors[consumer].admitted = total

    def fail(self, failure: Failure) -> None:
        """Ends the edge with an error; the first one stands."""
        if self.failure is None and not self.closed:
            self.failure = failure
        self.closed = True

    def close(self) -> None:
        """No more groups will come."""
        self.closed = True

    def drained(self, consumer: str) -> bool:
        """Whether `consumer` has been given all that there will be; what it has leased may still come back to it."""
        return self.closed and not self._cursors[consumer].waiting

    def ended(self, consumer: str) -> bool:
        """Whether `consumer` can never get another group."""
        return self.failure is not None or (self.drained(consumer) and not self._cursors[consumer].leased)

    def stats(self) -> EdgeStats:
        oldest = min(self._put_at, key=self._put_at.__getitem__, default="")
        return EdgeStats(
            name=self.name,
            groups=len(self._items),
            leased=len({g for c in self._cursors.values() for g in c.leased}),
            nbytes=self._bytes,
            max_groups=self.max_groups,
            max_bytes=self.max_bytes,
            oldest_age_s=self._clock() - self._put_at[oldest] if oldest else 0.0,
            oldest_group=oldest,
            total_groups=len(self._seen),
            redelivered=self._redelivered,
            closed=self.closed,
        )

    def _expire(self) -> None:
        now = self._clock()
        for cursor in self._cursors.values():
            late = [g for g, deadline in cursor.leased.items() if deadline <= now]
            for group_id in late:
                del cursor.leased[group_id]
            cursor.waiting[:0] = late
            cursor.taken -= len(late)
            self._redelivered += len(late)


class _Cursor:
    """What one consumer has before it."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.leased: dict[str, float] = {}  # group -> deadline
        self.taken = 0  # leased or acked
        self.admitted: int | None = None
