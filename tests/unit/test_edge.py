"""The queue between stages: who gets which group, when, and how it ends. Time is a number that the tests set."""

from __future__ import annotations

import pytest

from rollstream.graphs.edge import EdgeQueue, Failure, Item
from rollstream.stages.errors import WiringError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock):
    """Makes a queue; groups g0, g1 ... are put in with `fill`."""

    def make(consumers: tuple[str, ...] = ("b",), fill: int = 0, nbytes: int = 10, **bounds: float) -> EdgeQueue:
        limits = {"max_groups": 8, "max_bytes": 1000, "lease_s": 60.0} | bounds
        made = EdgeQueue("a -> b", consumers, clock=clock, **limits)
        for order in range(fill):
            made.put(item(order, nbytes))
        return made

    return make


def item(order: int, nbytes: int = 10, group_id: str = "") -> Item:
    group_id = group_id or f"g{order}"
    return Item(group_id=group_id, order=order, version=0, parts=(), nbytes=nbytes, num_rows=1, metrics={})


def ids(items: list[Item]) -> list[str]:
    return [i.group_id for i in items]


def test_groups_come_in_order_of_arrival(queue):
    edge = queue()
    for order in (2, 0, 1):
        edge.put(item(order))
    assert ids(edge.lease("b", 2)) == ["g2", "g0"]
    assert ids(edge.lease("b", 2)) == ["g1"]
    assert edge.lease("b", 2) == []


def test_each_consumer_has_a_cursor_of_its_own(queue):
    edge = queue(("b", "c"), fill=2)
    assert ids(edge.lease("b", 8)) == ["g0", "g1"]
    edge.ack("b", ["g0", "g1"])
    assert ids(edge.lease("c", 1)) == ["g0"]


def test_a_group_stays_until_every_consumer_has_acked_it(queue):
    edge = queue(("b", "c"), fill=1)
    edge.lease("b", 1), edge.lease("c", 1)
    edge.ack("b", ["g0"])
    assert edge.stats().groups == 1
    edge.ack("c", ["g0"])
    assert (edge.stats().groups, edge.stats().nbytes) == (0, 0)


def test_an_ack_repeated_or_of_no_known_group_changes_nothing(queue):
    edge = queue(fill=2)
    edge.lease("b", 1)
    for group_ids in (["g0"], ["g0"], ["g7"]):
        edge.ack("b", group_ids)
    assert (edge.stats().groups, edge.stats().nbytes) == (1, 10)


@pytest.mark.parametrize("bounds", [{"max_groups": 2}, {"max_bytes": 20}, {"max_bytes": 11}])
def test_at_either_bound_there_is_no_room(queue, bounds):
    edge = queue(fill=1, **bounds)
    assert edge.has_room()
    edge.put(item(1))
    assert not edge.has_room()
    edge.ack("b", ["g0"])
    assert edge.has_room()


def test_one_group_above_the_bytes_has_room_alone(queue):
    edge = queue(max_bytes=5)
    assert edge.has_room()
    edge.put(item(0, nbytes=10))
    assert not edge.has_room()


def test_min_groups_have_room_whatever_the_bounds(queue):
    edge = queue(fill=3, max_bytes=15, max_groups=2, min_groups=4)
    assert edge.has_room()
    edge.put(item(3))
    assert not edge.has_room()


def test_a_filled_lease_waits_until_it_is_full(queue):
    edge = queue(fill=2)
    assert edge.lease("b", 3, fill=True) == []
    edge.put(item(2))
    assert ids(edge.lease("b", 3, fill=True)) == ["g0", "g1", "g2"]


def test_a_filled_lease_takes_less_at_the_end(queue):
    edge = queue(fill=2)
    edge.close()
    assert len(edge.lease("b", 3, fill=True)) == 2


def test_a_filled_lease_takes_less_where_no_more_has_room(queue):
    assert len(queue(fill=2, max_groups=2).lease("b", 3, fill=True)) == 2


def test_a_filled_lease_takes_less_where_no_more_is_admitted(queue):
    edge = queue(fill=8)
    edge.admit("b", 2)
    assert len(edge.lease("b", 3, fill=True)) == 2
    assert edge.lease("b", 3, fill=True) == []


def test_admission_caps_what_is_taken_in_all(queue):
    edge = queue(("b", "c"), fill=6)
    edge.admit("b", 3)
    assert len(edge.lease("b", 2)) == 2
    assert len(edge.lease("b", 2)) == 1
    edge.ack("b", ["g0"])
    assert edge.lease("b", 2) == []
    assert len(edge.lease("c", 6)) == 6
    edge.admit("b", 5)
    assert ids(edge.lease("b", 8)) == ["g3", "g4"]


def test_a_lease_that_ran_out_is_given_again_first(queue, clock):
    edge = queue(fill=3)
    edge.lease("b", 2)
    clock.now = 59.9
    assert ids(edge.lease("b", 1)) == ["g2"]
    clock.now = 60.0
    assert ids(edge.lease("b", 8)) == ["g0", "g1"]
    assert edge.stats().redelivered == 2


def test_a_group_given_again_counts_once_for_admission(queue, clock):
    edge = queue(fill=3)
    edge.admit("b", 2)
    edge.lease("b", 2)
    clock.now = 60.0
    assert ids(edge.lease("b", 8)) == ["g0", "g1"]


def test_a_late_ack_still_counts_for_admission(queue, clock):
    """The group was sampled: the next one would be one more than may be under way."""
    edge = queue(("b", "c"), fill=3)
    edge.admit("b", 1)
    edge.lease("b", 1)
    clock.now = 60.0
    edge.lease("c", 1)  # looks for leases that ran out
    edge.ack("b", ["g0"])
    assert edge.lease("b", 1) == []


def test_a_kept_lease_never_runs_out(queue, clock):
    edge = queue(fill=1)
    edge.lease("b", 1, keep=True)
    clock.now = 1e9
    assert edge.lease("b", 1) == []
    edge.ack("b", ["g0"])
    assert edge.stats().groups == 0


def test_a_group_put_twice_is_taken_in_once(queue):
    edge = queue(fill=1)
    assert not edge.put(item(0))
    edge.lease("b", 1), edge.ack("b", ["g0"])
    assert not edge.put(item(0))
    assert (edge.stats().groups, edge.stats().total_groups) == (0, 1)


def test_two_groups_of_one_id_are_refused(queue):
    edge = queue(fill=1)
    with pytest.raises(WiringError, match="positions 0 and 5 are both called 'g0'"):
        edge.put(item(5, group_id="g0"))


def test_a_closed_edge_is_drained_when_all_is_given_and_ended_when_all_is_acked(queue):
    edge = queue(fill=1)
    edge.close()
    assert (edge.drained("b"), edge.ended("b")) == (False, False)
    edge.lease("b", 1)
    assert (edge.drained("b"), edge.ended("b")) == (True, False)
    edge.ack("b", ["g0"])
    assert edge.ended("b")


def test_an_open_edge_has_not_ended_when_empty(queue):
    assert not queue().drained("b")
    assert not queue().ended("b")


def test_an_edge_ends_for_each_consumer_by_itself(queue):
    edge = queue(("b", "c"), fill=1)
    edge.close()
    edge.ack("b", ["g0"])
    assert (edge.ended("b"), edge.ended("c")) == (True, False)


def test_the_first_failure_stands_and_ends_the_edge(queue):
    edge = queue(fill=1)
    first, second = (Failure(stage=s, subject="", cause="") for s in ("a", "z"))
    edge.fail(first), edge.fail(second)
    assert edge.failure is first
    assert edge.ended("b")


def test_an_edge_that_was_closed_cannot_fail(queue):
    edge = queue()
    edge.close()
    edge.fail(Failure(stage="a", subject="", cause=""))
    assert edge.failure is None


def test_stats_tell_what_is_held_and_for_how_long(queue, clock):
    edge = queue(("b", "c"), fill=1)
    clock.now = 4.0
    edge.put(item(1))
    edge.lease("b", 2), edge.lease("c", 1)
    clock.now = 6.0
    stats = edge.stats()
    assert (stats.groups, stats.leased, stats.nbytes, stats.total_groups) == (2, 2, 20, 2)
    assert (stats.oldest_group, stats.oldest_age_s, stats.closed) == ("g0", 6.0, False)


def test_stats_of_an_empty_edge(queue):
    assert (queue().stats().oldest_group, queue().stats().oldest_age_s) == ("", 0.0)
