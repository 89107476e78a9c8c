"""Any sequence of what producers, consumers, the flow and time may do to one edge, against a plain model of it.

The whole graph, with several edges and their deaths, is in test_flow_machine.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.graphs.edge import EdgeQueue
from rollstream.graphs.item import Item, Left, Part

CONSUMERS = st.sampled_from(["b", "c"])
HOLDERS = st.integers(0, 1)
MAX_GROUPS, MAX_BYTES, LEASE_S, NEEDED, MAX_DEATHS = 4, 50, 10.0, 2, 2


@dataclass
class Consumer:
    """What one consumer has, as the model has it."""

    holders: list[str]
    below: int = 3
    acked: set[int] = field(default_factory=set)
    deaths: dict[int, int] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)  # order -> holder, end
    newest: dict[str, Sequence[int]] = field(default_factory=dict)  # holder -> what it got when it last asked

    def forget(self, order: int) -> None:
        self.leases.pop(order, None)
        self.acked.discard(order)
        self.aside.discard(order)

    def ack(self, order: int) -> None:
        self.forget(order)
        self.acked.add(order)


class EdgeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        bounds = {"max_groups": MAX_GROUPS, "max_bytes": MAX_BYTES, "needed": NEEDED}
        clock = lambda: self.now  # noqa: E731
        self.edge = EdgeQueue("a -> b, c", ["b", "c"], lease_s=LEASE_S, clock=clock, max_deaths=MAX_DEATHS, **bounds)
        self.sizes: dict[int, int] = {}  # of the groups here
        self.retired: set[int] = set()
        self.left: set[int] = set()  # filtered, and told of
        self.consumers = {name: Consumer([f"{name}/0", f"{name}/1"]) for name in ("b", "c")}
        for name in self.consumers:
            self.edge.admit(name, 3)

    @property
    def known(self) -> set[int]:
        return {*self.sizes, *self.retired, *self.left}

    def next(self, ahead: int) -> int:
        """A group that is not known; they overtake each other by a few places."""
        return [order for order in range(len(self.known) + 4) if order not in self.known][ahead]

    def drop(self, orders: Iterable[int]) -> None:
        for order in orders:
            self.sizes.pop(order, None)
            self.left.discard(order)
            for consumer in self.consumers.values():
                consumer.forget(order), consumer.deaths.pop(order, None)

    # Producers and the flow --------------------------------------------------------------------------------------

    @precondition(lambda self: not self.edge.closed and self.edge.has_room())
    @rule(ahead=st.integers(0, 3), nbytes=st.integers(1, 60))
    def put(self, ahead: int, nbytes: int) -> None:
        order = self.next(ahead)
        assert self.edge.put(made(order, nbytes))
        self.sizes[order] = nbytes

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        assert not self.edge.put(made(data.draw(st.sampled_from(sorted(self.known))), 1))

    @rule(ahead=st.integers(0, 3))
    def leave(self, ahead: int) -> None:
        order = self.next(ahead)
        self.edge.leave(Left(order=order, group_id=f"g{order}", kind="filtered", stage="a", reason="dull"))
        self.left.add(order)

    @rule(orders=st.sets(st.integers(0, 9), max_size=3))
    def retire(self, orders: set[int]) -> None:
        self.edge.retire(orders)
        self.retired |= orders
        self.drop(orders)

    @rule(frontier=st.integers(0, 6))
    def retire_below(self, frontier: int) -> None:
        self.edge.retire_below(frontier)
        self.retired |= set(range(frontier))
        self.drop(range(frontier))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        orders = data.draw(st.sets(st.sampled_from(sorted(self.sizes)))) if self.sizes else set()
        self.edge.lose(orders)
        self.drop(orders)

    @precondition(lambda self: len(self.sizes) > 1)
    @rule()
    def close(self) -> None:
        self.edge.closed = True

    # Consumers ---------------------------------------------------------------------------------------------------

    def waiting(self, name: str) -> list[int]:
        """What this consumer may be given, in the order in which it must be."""
        consumer = self.consumers[name]
        taken = {*consumer.acked, *consumer.aside, *consumer.leases}
        return sorted(order for order in self.sizes if order not in taken and order < consumer.below)

    @rule(name=CONSUMERS, number=HOLDERS, at_most=st.integers(1, 3), fill=st.booleans(), keep=st.booleans())
    def lease(self, name: str, number: int, at_most: int, fill: bool, keep: bool) -> None:
        consumer, waiting = self.consumers[name], self.waiting(name)
        holder = consumer.holders[number]
        taken = [i.order for i in self.edge.lease(name, at_most, holder=holder, fill=fill, keep=keep)]
        assert taken == waiting[: len(taken)]
        if any(order in consumer.deaths for order in taken):
            assert len(taken) == 1
        elif len(taken) < min(at_most, len(waiting)):
            assert waiting[len(taken)] in consumer.deaths or (fill and not taken)
        consumer.newest[holder] = taken
        consumer.leases |= {order: (holder, math.inf if keep else self.now + LEASE_S) for order in taken}

    @precondition(lambda self: self.sizes)
    @rule(name=CONSUMERS, data=st.data())
    def ack(self, name: str, data: st.DataObject) -> None:
        """In time or late, once or again, or of a group that was given before a restart."""
        order = data.draw(st.sampled_from(sorted(self.sizes)))
        self.edge.ack(name, [order])
        self.consumers[name].ack(order)

    @rule(name=CONSUMERS, data=st.data())
    def mark(self, name: str, data: st.DataObject) -> None:
        consumer = self.consumers[name]
        done = data.draw(st.sets(st.sampled_from(sorted(self.sizes)))) if self.sizes else set()
        self.edge.mark(name, done)
        consumer.acked &= done
        for order in done - consumer.aside:
            consumer.ack(order)

    @rule(name=CONSUMERS, below=st.integers(0, 12))
    def admit(self, name: str, below: int) -> None:
        self.edge.admit(name, below)
        self.consumers[name].below = max(self.consumers[name].below, below)

    # Deaths and time ---------------------------------------------------------------------------------------------

    def take_back(self, name: str, orders: Iterable[int], died: bool) -> set[int]:
        """The model's part of it: what is set aside."""
        consumer, aside = self.consumers[name], set()
        for order in orders:
            holder, _ = consumer.leases.pop(order)
            if died and order in consumer.newest.get(holder, ()):
                consumer.deaths[order] = consumer.deaths.get(order, 0) + 1
                aside |= {order} if consumer.deaths[order] >= MAX_DEATHS else set()
        consumer.aside |= aside
        return aside

    @rule(name=CONSUMERS, number=HOLDERS, died=st.booleans())
    def release(self, name: str, number: int, died: bool) -> None:
        """A new holder follows."""
        consumer = self.consumers[name]
        holder = consumer.holders[number]
        consumer.holders[number] += "'"
        told = {left.order for left in self.edge.release(name, holder, died="killed" if died else "")}
        assert told == self.take_back(name, [o for o, (h, _) in consumer.leases.items() if h == holder], died)
        assert self.edge.lease(name, 1, holder=holder) == []
        assert self.edge.ended(name, holder)

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        told = {(left.stage, left.order) for left in self.edge.expire()}
        late = {n: [o for o, (_, end) in c.leases.items() if end <= self.now] for n, c in self.consumers.items()}
        assert told == {(name, order) for name in late for order in self.take_back(name, late[name], True)}

    @rule(name=CONSUMERS, number=HOLDERS)
    def renew(self, name: str, number: int) -> None:
        consumer = self.consumers[name]
        holder = consumer.holders[number]
        self.edge.renew(name, holder)
        mine = {o: end for o, (h, end) in consumer.leases.items() if h == holder}
        consumer.leases |= {o: (holder, max(end, self.now + LEASE_S)) for o, end in mine.items()}

    # What always holds -------------------------------------------------------------------------------------------

    @invariant()
    def it_holds_what_is_not_retired(self) -> None:
        stats = self.edge.stats()
        assert set(self.edge.held()) == set(self.sizes)
        assert (stats.groups, stats.nbytes) == (len(self.sizes), sum(self.sizes.values()))
        aside = set.union(*(c.aside for c in self.consumers.values()))
        assert self.left | aside <= {left.order for left in stats.left}
        frontier, others = self.edge.known()
        assert {*range(frontier), *others} == self.known | set(range(frontier))
        assert set(range(frontier)) <= self.known

    @invariant()
    def there_is_room_below_the_bounds_and_for_what_a_step_needs(self) -> None:
        below = len(self.sizes) < MAX_GROUPS and sum(self.sizes.values()) < MAX_BYTES
        lowest = [order for order in range(20) if order not in self.retired][:NEEDED]
        assert self.edge.has_room() == (below or not self.known.issuperset(lowest))

    @invariant()
    def it_ends_where_all_is_acked_and_only_there(self) -> None:
        for name, consumer in self.consumers.items():
            ended = self.edge.closed and set(self.sizes) <= consumer.acked | consumer.aside
            assert self.edge.ended(name) == ended

    def teardown(self) -> None:
        """Nothing is lost: who asks to the end is given everything that it has not acked and that is not set aside."""
        self.edge.closed = True
        for name, consumer in self.consumers.items():
            for holder in consumer.holders:
                self.edge.release(name, holder)
            self.edge.admit(name, 100)
            given: list[int] = []
            while items := self.edge.lease(name, 2, holder="last"):
                given += [item.order for item in items]
            assert set(given) == set(self.sizes) - consumer.acked - consumer.aside


def made(order: int, nbytes: int) -> Item:
    part = Part(edge="a", nbytes=nbytes)
    return Item(group_id=f"g{order}", order=order, version=0, birth="x", num_rows=1, parts=(part,))


TestEdge = EdgeMachine.TestCase
TestEdge.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
