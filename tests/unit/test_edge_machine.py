"""Any sequence of what producers, consumers, the runner and time may do to an edge, against a plain model of it."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollstream.graphs.edge import EdgeQueue, Item

CONSUMERS = ("b", "c")
MAX_GROUPS, MAX_BYTES, LEASE_S = 4, 50, 10.0


class EdgeMachine(RuleBasedStateMachine):
    """The model: groups put, and for each consumer those ever given, those acked, and its leases with their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        limits = {"max_groups": MAX_GROUPS, "max_bytes": MAX_BYTES, "lease_s": LEASE_S}
        self.edge = EdgeQueue("a -> b, c", CONSUMERS, clock=lambda: self.now, **limits)
        self.sizes: dict[str, int] = {}
        self.given: dict[str, set[str]] = {c: set() for c in CONSUMERS}
        self.acked: dict[str, set[str]] = {c: set() for c in CONSUMERS}
        self.leases: dict[str, dict[str, float]] = {c: {} for c in CONSUMERS}
        self.admitted = dict.fromkeys(CONSUMERS, 0)
        for consumer in CONSUMERS:
            self.admit(consumer, 3)

    @precondition(lambda self: not self.edge.closed and self.edge.has_room())
    @rule(nbytes=st.integers(1, 60))
    def put(self, nbytes: int) -> None:
        order = len(self.sizes)
        assert self.edge.put(self._item(order, nbytes))
        self.sizes[f"g{order}"] = nbytes

    @precondition(lambda self: not self.edge.closed and self.sizes)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        order = data.draw(st.integers(0, len(self.sizes) - 1))
        assert not self.edge.put(self._item(order, 1))

    @rule(consumer=st.sampled_from(CONSUMERS), at_most=st.integers(1, 3), fill=st.booleans(), keep=st.booleans())
    def lease(self, consumer: str, at_most: int, fill: bool, keep: bool) -> None:
        self._take(consumer, at_most, fill=fill, keep=keep)

    def _take(self, consumer: str, at_most: int, *, fill: bool = False, keep: bool = False) -> None:
        running = {g: end for g, end in self.leases[consumer].items() if end > self.now}
        waiting = set(self.sizes) - self.acked[consumer] - set(running)
        allowed = self.admitted[consumer] - len(self.acked[consumer]) - len(running)
        wanted = max(min(at_most, len(waiting), allowed), 0)
        taken = [i.group_id for i in self.edge.lease(consumer, at_most, fill=fill, keep=keep)]
        assert len(taken) == wanted or (fill and not taken)
        assert set(taken) <= waiting
        self.given[consumer] |= set(taken)
        self.leases[consumer] = running | dict.fromkeys(taken, math.inf if keep else self.now + LEASE_S)

    @precondition(lambda self: any(self.given.values()))
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        """Of a group that was given at some time, in time or late, once or again."""
        consumer = data.draw(st.sampled_from([c for c in CONSUMERS if self.given[c]]))
        group_id = data.draw(st.sampled_from(sorted(self.given[consumer])))
        self.edge.ack(consumer, [group_id])
        self.acked[consumer].add(group_id)
        self.leases[consumer].pop(group_id, None)

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def overrun(self, data: st.DataObject) -> None:
        """Leases run out, which is noticed when anybody asks; then a consumer acks after all, and asks for more."""
        late = data.draw(st.sampled_from([c for c in CONSUMERS if self.leases[c]]))
        group_id = data.draw(st.sampled_from(sorted(self.leases[late])))
        self.wait(LEASE_S)
        self._take(next(c for c in CONSUMERS if c != late), 1)
        self.edge.ack(late, [group_id])
        self.acked[late].add(group_id)
        self.leases[late].pop(group_id)
        self._take(late, 8)

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(consumer=st.sampled_from(CONSUMERS), more=st.integers(0, 3))
    def admit(self, consumer: str, more: int) -> None:
        self.admitted[consumer] = len(self.given[consumer]) + more
        self.edge.admit(consumer, self.admitted[consumer])

    @precondition(lambda self: len(self.sizes) > 1)
    @rule()
    def close(self) -> None:
        self.edge.close()

    @invariant()
    def holds_what_is_not_acked_by_all(self) -> None:
        held = set(self.sizes) - set.intersection(*self.acked.values())
        stats = self.edge.stats()
        assert (stats.groups, stats.nbytes) == (len(held), sum(self.sizes[g] for g in held))

    @invariant()
    def passes_its_bounds_by_one_group_at_most(self) -> None:
        stats = self.edge.stats()
        assert stats.groups <= MAX_GROUPS
        assert stats.nbytes < MAX_BYTES + max(self.sizes.values(), default=1)

    @invariant()
    def gives_no_more_groups_than_are_admitted(self) -> None:
        assert all(len(self.given[c]) <= self.admitted[c] for c in CONSUMERS)

    @invariant()
    def ends_where_all_is_acked_and_only_there(self) -> None:
        for consumer in CONSUMERS:
            all_acked = self.edge.closed and self.acked[consumer] == set(self.sizes)
            assert self.edge.ended(consumer) == all_acked

    def teardown(self) -> None:
        """Nothing is lost: whoever asks to the end is given everything that it has not acked."""
        self.edge.close()
        for consumer in CONSUMERS:
            self.now += LEASE_S
            self._take(consumer, 10**9)
            self.admit(consumer, 10**9)
            self._take(consumer, 10**9)
            assert set(self.leases[consumer]) | self.acked[consumer] == set(self.sizes)

    @staticmethod
    def _item(order: int, nbytes: int) -> Item:
        return Item(group_id=f"g{order}", order=order, version=0, parts=(), nbytes=nbytes, num_rows=1, metrics={})


TestEdge = EdgeMachine.TestCase
TestEdge.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
