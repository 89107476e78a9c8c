"""The Arrow queue between stages, without Ray: who holds which group, and what may be taken.

    producer --put--> [ waiting | leased | acked ] --lease / ack--> each consumer, by a cursor of its own
                                                   --retire-------> gone: trained, or left the graph

A group stays until it is retired, for its columns are needed until it is trained. A lease that is not acked in time, or
whose holder died, is given out again; a group that took its holder down too often is set aside. What a holder got
before it last asked is done, and perhaps on its way to the next edge: it is given out again too, but not blamed.
`has_room` is false past the bounds, and then the producers are not pulled: pressure, never a drop. `admit` says up to
which group a consumer may go, which is how staleness is bounded before compute is spent. Groups are named by their
`order`, their position in the run's prompt sequence, and given out lowest first.

    >>> queue = EdgeQueue("a -> b", ["b"], max_groups=2, max_bytes=100, lease_s=60, clock=lambda: 0.0)
    >>> queue.put(Item(group_id="g0", order=0, version=0, birth="x", num_rows=1, parts=(Part(edge="a", nbytes=60),)))
    True
    >>> [i.group_id for i in queue.lease("b", at_most=8, holder="b/0")]
    ['g0']
    >>> queue.ack("b", [0]); queue.retire([0]); queue.stats().groups
    0
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rollstream.graphs.item import Failure, Item, Left
from rollstream.graphs.orders import Orders
from rollstream.graphs.stats import EdgeStats, Whereabouts
from rollstream.stages.errors import WiringError


class EdgeQueue:
    """State of one edge. Times come from `clock`, in seconds.

    The bounds hold once the first `needed` groups that are not retired are all here: a step that needs so many would
    wait for ever behind an edge that is full with others.
    """

    def __init__(
        self,
        name: str,
        consumers: Sequence[str],
        *,
        max_groups: int,
        max_bytes: int,
        lease_s: float,
        clock: Callable[[], float],
        needed: int = 1,
        max_deaths: int = 2,
    ):
        self.name = name
        self.max_groups, self.max_bytes, self.lease_s = max_groups, max_bytes, lease_s
        self.failure: Failure | None = None
        self.closed = False
        self._clock = clock
        self._needed, self._max_deaths = needed, max_deaths
        self._items: dict[int, Item] = {}
        self._group_ids: dict[str, int] = {}
        self._put_at: dict[int, float] = {}
        self._retired = Orders()
        self._first_missing = 0  # all orders below it are here or retired
        self._left: dict[int, Left] = {}
        self._bytes = self._redelivered = self._total = 0
        self._overdue: set[str] = set()
        self._released: set[str] = set()
        self._cursors = {c: _Cursor() for c in consumers}

    # What is here ------------------------------------------------------------------------------------------------

    def put(self, item: Item) -> bool:
        """Takes a group in; false if it was here before: a group whose lease ran out may be made twice.

        Raises WiringError where another group that is here has its id.
        """
        if self.knows(item.order):
            return False
        if (twin := self._group_ids.get(item.group_id)) is not None:
            raise WiringError(
                f"{self.name}: the groups at positions {twin} and {item.order} are both called "
                f"{item.group_id!r}; a source must give each group an id of its own"
            )
        self._items[item.order] = item
        self._group_ids[item.group_id] = item.order
        self._put_at[item.order] = self._clock()
        self._bytes += item.parts[-1].nbytes
        self._total += 1
        for cursor in self._cursors.values():
            bisect.insort(cursor.waiting, item.order)
        return True

    def knows(self, order: int) -> bool:
        """Whether this group is here, or was."""
        return order in self._items or order in self._retired or order in self._left

    def has_room(self) -> bool:
        """Whether one more group may be pulled. The bounds may be passed by that one group only, of each producer."""
        if len(self._items) < self.max_groups and self._bytes < self.max_bytes:
            return True
        return self._missing() - self._retired.count_below(self._missing()) < self._needed

    def retire(self, orders: Iterable[int]) -> None:
        """These groups are trained or have left the graph: nobody will ask for them again."""
        for order in orders:
            self._retired.add(order)
            self._drop(order)

    def retire_below(self, frontier: int) -> None:
        """All groups below `frontier` are retired."""
        self._retired.raise_to(frontier)
        for order in [o for o in (*self._items, *self._left) if o < frontier]:
            self._drop(order)

    def lose(self, orders: Collection[int]) -> None:
        """These groups are not here any more, and may come again."""
        for order in orders:
            self._drop(order)
        self._first_missing = min([self._first_missing, *orders])

    def leave(self, left: Left) -> None:
        """A group goes no further; it is told of in `stats` until it is retired."""
        self._left[left.order] = left

    def held(self) -> dict[int, str]:
        """Births of all groups here, by order."""
        return {order: item.birth for order, item in self._items.items()}

    def item(self, order: int) -> Item | None:
        return self._items.get(order)

    def known(self) -> tuple[int, frozenset[int]]:
        """All groups that are or were here: those below the number, and these."""
        missing = self._missing()
        return missing, frozenset(o for o in (*self._items, *self._retired.ahead, *self._left) if o > missing)

    # Who has what ------------------------------------------------------------------------------------------------

    def expect(self, consumer: str, holder: str) -> None:
        """`holder` will ask for groups: a share is left for it."""
        self._cursors[consumer].working.setdefault(holder, frozenset())

    def lease(
        self,
        consumer: str,
        at_most: int,
        *,
        holder: str,
        holding: Collection[int] = (),
        fill: bool = False,
        keep: bool = False,
        share: bool = False,
    ) -> list[Item]:
        """Up to `at_most` groups, lowest first; `holding` are those that the holder is at work on. With `fill`: all of
        them, or fewer only where no more can be had before the next `admit`, the end, or room; so that how groups fall
        into leases does not depend on time. With `share`: no more than makes the holders of this consumer equally
        loaded. With `keep` the lease never ends: for a consumer that may hold groups for long and without which there
        is no run.

        A group whose holder died is given alone, to a holder of no other: if it is the reason, it takes no other down.
        """
        if holder in self._released:
            return []
        cursor = self._cursors[consumer]
        cursor.working[holder] = frozenset(holding)
        if any(order in cursor.deaths for order in holding):
            return []
        taken = [order for order in cursor.waiting[:at_most] if cursor.admits(order)]
        suspects = [order for order in taken if order in cursor.deaths]
        if suspects:
            taken = taken[: max(taken.index(suspects[0]), 0 if holding else 1)]
        elif fill and len(taken) < at_most and self._more_to_come(cursor):
            return []
        if share:
            taken = taken[: cursor.share_of(holder, sum(map(cursor.admits, cursor.waiting)))]
        for order in taken:
            cursor.waiting.remove(order)
            cursor.leased[order] = _Lease(holder, math.inf if keep else self._clock() + self.lease_s)
        cursor.working[holder] |= frozenset(taken)
        return [self._items[order] for order in taken]

    def can_give(self, consumer: str, wanted: int) -> bool:
        """Whether `consumer` may take so many groups now, or will never be able to."""
        cursor = self._cursors[consumer]
        return self.closed or sum(map(cursor.admits, cursor.waiting)) >= wanted

    def renew(self, consumer: str, holder: str) -> None:
        """The leases of `holder` begin anew: what it makes has no room yet, and that is no fault of its own."""
        leased = self._cursors[consumer].leased
        for order in [o for o, lease in leased.items() if lease.holder == holder]:
            leased[order] = _Lease(holder, max(leased[order].until, self._clock() + self.lease_s))

    def expire(self) -> list[Left]:
        """Takes back the leases that ran out; groups that this befell `max_deaths` times are set aside, and returned.
        To be called every now and then."""
        now = self._clock()
        aside: list[Left] = []
        for consumer, cursor in self._cursors.items():
            late = [order for order, lease in cursor.leased.items() if lease.until <= now]
            self._overdue |= {cursor.leased[order].holder for order in late if cursor.blames(order)}
            aside += self._take_back(consumer, late, f"it did not finish in {self.lease_s:g} s")
        return aside

    def ack(self, consumer: str, orders: Iterable[int]) -> None:
        """What the consumer makes of these groups is safe; it will not be given them again, whether their leases ran
        out or not."""
        cursor = self._cursors[consumer]
        for order in orders:
            if order in self._items:
                cursor.forget(order)
                cursor.acked.add(order)

    def mark(self, consumer: str, done: Collection[int]) -> None:
        """Of all groups here the consumer is done with just these: after a restart on either side."""
        cursor = self._cursors[consumer]
        for order in list(cursor.acked):
            if order not in done:
                cursor.acked.remove(order)
                bisect.insort(cursor.waiting, order)
        self.ack(consumer, [order for order in (*cursor.waiting, *cursor.leased) if order in done])

    def release(self, consumer: str, holder: str, *, died: str = "") -> list[Left]:
        """Takes back what `holder` has and gives it no more. `died` says how its process ended, where it did: groups
        that have seen that `max_deaths` times are set aside, and returned."""
        self._released.add(holder)
        self._overdue.discard(holder)
        cursor = self._cursors[consumer]
        aside = self._take_back(
            consumer, [order for order, lease in cursor.leased.items() if lease.holder == holder], died
        )
        cursor.working.pop(holder, None)
        return aside

    def admit(self, consumer: str, below: int) -> None:
        """`consumer` may take groups of orders below this; never fewer than it might before."""
        cursor = self._cursors[consumer]
        cursor.below = max(cursor.below or 0, below)

    # The end -----------------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Ends the edge with an error; the first one stands."""
        if self.failure is None:
            self.failure = failure

    def drained(self, consumer: str) -> bool:
        """Whether `consumer` has been given all that there will be; what it has leased may still come back to it."""
        return self.closed and not self._cursors[consumer].waiting

    def ended(self, consumer: str, holder: str = "") -> bool:
        """Whether `consumer`, or this holder of it, can never get another group."""
        return (
            self.failure is not None
            or holder in self._released
            or (self.drained(consumer) and not self._cursors[consumer].leased)
        )

    def stats(self) -> EdgeStats:
        oldest = min(self._put_at, key=self._put_at.__getitem__, default=None)
        return EdgeStats(
            name=self.name,
            groups=len(self._items),
            leased=len({order for c in self._cursors.values() for order in c.leased}),
            nbytes=self._bytes,
            max_groups=self.max_groups,
            max_bytes=self.max_bytes,
            oldest_age_s=0.0 if oldest is None else self._clock() - self._put_at[oldest],
            oldest_group="" if oldest is None else self._items[oldest].group_id,
            total_groups=self._total,
            redelivered=self._redelivered,
            closed=self.closed,
            left=tuple(self._left.values()),
            overdue=tuple(sorted(self._overdue)),
        )

    def whereabouts(self) -> list[Whereabouts]:
        """Every group here, lowest first, and what each consumer has done with it."""
        return [
            Whereabouts(
                order=order,
                group_id=item.group_id,
                version=item.version,
                consumers={name: cursor.state(order) for name, cursor in self._cursors.items()},
            )
            for order, item in sorted(self._items.items())
        ]

    # -------------------------------------------------------------------------------------------------------------

    def _drop(self, order: int) -> None:
        self._left.pop(order, None)
        item = self._items.pop(order, None)
        if item is None:
            return
        del self._group_ids[item.group_id], self._put_at[order]
        self._bytes -= item.parts[-1].nbytes
        for cursor in self._cursors.values():
            cursor.forget(order)
            cursor.deaths.pop(order, None)

    def _missing(self) -> int:
        """The lowest order that is neither here nor retired."""
        self._first_missing = max(self._first_missing, self._retired.frontier)
        while self.knows(self._first_missing):
            self._first_missing += 1
        return self._first_missing

    def _more_to_come(self, cursor: _Cursor) -> bool:
        return not self.closed and self.has_room() and cursor.admits(self._missing())

    def _take_back(self, consumer: str, orders: Sequence[int], died: str) -> list[Left]:
        cursor = self._cursors[consumer]
        aside: list[Left] = []
        for order in orders:
            blamed = bool(died) and cursor.blames(order)
            del cursor.leased[order]
            if blamed:
                cursor.deaths[order] = cursor.deaths.get(order, 0) + 1
            if blamed and cursor.deaths[order] >= self._max_deaths:
                reason = f"{consumer} died {cursor.deaths[order]} times while it had this group; the last time: {died}"
                group_id = self._items[order].group_id
                aside.append(Left(order=order, group_id=group_id, kind="quarantined", stage=consumer, reason=reason))
                self.leave(aside[-1])
            else:
                bisect.insort(cursor.waiting, order)
                self._redelivered += 1
        return aside


@dataclass(frozen=True)
class _Lease:
    holder: str
    until: float


class _Cursor:
    """What one consumer has before it."""

    def __init__(self) -> None:
        self.waiting: list[int] = []  # ascending
        self.leased: dict[int, _Lease] = {}
        self.working: dict[str, frozenset[int]] = {}  # what each holder got when it last asked
        self.acked: set[int] = set()  # of the groups that are here
        self.deaths: dict[int, int] = {}  # of holders, by the group that they had
        self.below: int | None = None

    def admits(self, order: int) -> bool:
        return self.below is None or order < self.below

    def blames(self, order: int) -> bool:
        """Whether the holder of this group is at work on it."""
        return order in self.working.get(self.leased[order].holder, ())

    def share_of(self, holder: str, num_more: int) -> int:
        """Of `num_more` groups, those that bring a holder to an equal part of all; those that it has count."""
        loads = dict.fromkeys(self.working, 0)
        for lease in self.leased.values():
            loads[lease.holder] = loads.get(lease.holder, 0) + 1
        equal = math.ceil((sum(loads.values()) + num_more) / len(loads))
        return max(equal - loads[holder], 0)

    def forget(self, order: int) -> None:
        self.leased.pop(order, None)
        self.acked.discard(order)
        at = bisect.bisect_left(self.waiting, order)
        if at < len(self.waiting) and self.waiting[at] == order:
            del self.waiting[at]

    def state(self, order: int) -> str:
        return "done" if order in self.acked else "leased" if order in self.leased else "waiting"
