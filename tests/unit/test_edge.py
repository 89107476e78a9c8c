"""The queue between stages: who gets which group, when, and how it ends. Time is a number that the tests set."""

from __future__ import annotations

import pytest
from edge_toys import given, item, left

from rollstream.graphs.item import Failure, Item, Part
from rollstream.stages.errors import WiringError

# What is here --------------------------------------------------------------------------------------------------------


def test_a_group_put_twice_is_taken_in_once(queue):
    edge = queue(holds=1)
    assert not edge.put(item(0))
    edge.retire([0])
    assert not edge.put(item(0))
    assert (edge.stats().groups, edge.stats().nbytes, edge.stats().total_groups) == (0, 0, 1)


def test_two_groups_of_one_id_are_refused(queue):
    with pytest.raises(WiringError, match="positions 0 and 5 are both called 'g0'"):
        queue(holds=1).put(item(5, group_id="g0"))


def test_a_group_stays_until_it_is_retired_whoever_has_acked_it(queue):
    edge = queue(("b", "c"), holds=2)
    edge.ack("b", [0, 1]), edge.ack("c", [0, 1])
    assert edge.held() == {0: "b0", 1: "b1"}
    edge.retire([0])
    assert (edge.held(), edge.stats().nbytes) == ({1: "b1"}, 10)


def test_only_the_columns_that_the_edge_owns_count_as_its_bytes(queue):
    edge = queue()
    edge.put(Item(**{**item(0).__dict__, "parts": (Part(edge="z", nbytes=500), Part(edge="a", nbytes=7))}))
    assert edge.stats().nbytes == 7


@pytest.mark.parametrize("bounds", [{"max_groups": 2}, {"max_bytes": 20}, {"max_bytes": 11}])
def test_at_either_bound_there_is_no_room_until_a_group_is_retired(queue, bounds):
    edge = queue(holds=1, **bounds)
    assert edge.has_room()
    edge.put(item(1))
    edge.ack("b", [0, 1])
    assert not edge.has_room()
    edge.retire([0])
    assert edge.has_room()


def test_a_full_edge_has_room_until_the_groups_of_a_step_are_here(queue):
    """Groups 2, 3, 4 wait for 0 and 1; a step of two groups would never come if these had no room."""
    edge = queue(max_groups=3, needed=2)
    for order in (2, 3, 4, 0):
        assert edge.has_room()
        edge.put(item(order))
    edge.put(item(1))
    assert not edge.has_room()


def test_after_a_step_the_next_ones_groups_have_room(queue):
    edge = queue(holds=2, max_groups=1, needed=2)
    assert not edge.has_room()
    edge.retire([0, 1])
    edge.put(item(3))
    assert edge.has_room()


def test_a_group_that_left_is_not_waited_for_and_takes_no_room(queue):
    edge = queue(max_groups=1, needed=2)
    edge.leave(left(0)), edge.put(item(1))
    assert not edge.has_room()
    edge.retire([0])
    assert edge.has_room()


def test_what_is_lost_may_come_again_to_whoever_had_it(queue):
    edge = queue(holds=3)
    edge.ack("b", [0, 1, 2])
    edge.lose([1])
    assert (edge.held(), edge.known()) == ({0: "b0", 2: "b2"}, (1, frozenset({2})))
    assert edge.put(item(1))
    assert given(edge, 8) == [1]


def test_known_are_the_groups_here_the_retired_and_those_that_left(queue):
    edge = queue(holds=2)
    edge.retire([0, 5]), edge.put(item(3)), edge.leave(left(7))
    assert edge.known() == (2, frozenset({3, 5, 7}))
    edge.retire_below(4)
    assert edge.known() == (4, frozenset({5, 7}))
    assert edge.held() == {}


# Who has what --------------------------------------------------------------------------------------------------------


def test_groups_come_lowest_first_whenever_they_arrived(queue):
    edge = queue()
    for order in (2, 0, 1):
        edge.put(item(order))
    assert given(edge, 2) == [0, 1]
    assert given(edge, 2) == [2]
    assert given(edge, 2) == []


def test_each_consumer_has_a_cursor_of_its_own(queue):
    edge = queue(("b", "c"), holds=2)
    assert given(edge, 8) == [0, 1]
    edge.ack("b", [0, 1])
    assert given(edge, 1, "c", holder="c/0") == [0]


@pytest.mark.parametrize("leased", [True, False])
def test_a_group_that_is_acked_is_not_given_again(queue, clock, leased):
    edge = queue(holds=2)
    if leased:
        given(edge, 1)
    edge.ack("b", [0]), edge.ack("b", [0]), edge.ack("b", [7])
    clock.now = 60.0
    edge.expire()
    assert given(edge, 8) == [1]


def test_admission_is_by_order_and_never_goes_back(queue):
    edge = queue(("b", "c"), holds=4)
    edge.admit("b", 2), edge.admit("b", 1)
    assert given(edge, 8) == [0, 1]
    edge.ack("b", [0, 1])
    assert given(edge, 8) == []
    assert given(edge, 8, "c", holder="c/0") == [0, 1, 2, 3]
    edge.admit("b", 3)
    assert given(edge, 8) == [2]


def test_a_kept_lease_never_runs_out(queue, clock):
    edge = queue(holds=1)
    given(edge, 1, keep=True)
    clock.now = 1e9
    assert edge.expire() == []
    assert (given(edge, 1), edge.stats().overdue) == ([], ())


# Leases that are filled ----------------------------------------------------------------------------------------------


def test_a_filled_lease_waits_until_it_is_full(queue):
    edge = queue(holds=2)
    assert given(edge, 3, fill=True) == []
    edge.put(item(2))
    assert given(edge, 3, fill=True) == [0, 1, 2]


def test_a_filled_lease_takes_less_at_the_end(queue):
    edge = queue(holds=2)
    edge.closed = True
    assert given(edge, 3, fill=True) == [0, 1]


def test_a_filled_lease_takes_less_where_no_more_has_room(queue):
    assert given(queue(holds=2, max_groups=2), 3, fill=True) == [0, 1]


def test_a_filled_lease_takes_less_where_no_more_is_admitted(queue):
    edge = queue(holds=4)
    edge.admit("b", 2)
    assert given(edge, 3, fill=True) == [0, 1]
    assert given(edge, 3, fill=True) == []


def test_a_filled_lease_does_not_wait_for_a_group_that_left(queue):
    edge = queue(holds=1)
    edge.admit("b", 2)
    assert given(edge, 2, fill=True) == []
    edge.leave(left(1))
    assert given(edge, 2, fill=True) == [0]


# After a restart on either side --------------------------------------------------------------------------------------


def test_mark_says_exactly_what_the_consumer_is_done_with(queue):
    edge = queue(("b", "c"), holds=4)
    edge.ack("b", [0, 1])
    given(edge, 1)  # 2
    edge.mark("b", {1, 2, 9})
    assert [w.consumers["b"] for w in edge.whereabouts()] == ["waiting", "done", "done", "waiting"]
    assert given(edge, 8) == [0, 3]
    assert given(edge, 8, "c", holder="c/0") == [0, 1, 2, 3]


# The end -------------------------------------------------------------------------------------------------------------


def test_a_closed_edge_is_drained_when_all_is_given_and_ended_when_all_is_acked(queue):
    edge = queue(holds=1)
    edge.closed = True
    assert (edge.drained("b"), edge.ended("b")) == (False, False)
    given(edge, 1)
    assert (edge.drained("b"), edge.ended("b")) == (True, False)
    edge.ack("b", [0])
    assert edge.ended("b")


def test_what_a_dead_holder_had_keeps_the_edge_from_its_end(queue):
    edge = queue(holds=1)
    edge.closed = True
    given(edge, 1)
    edge.release("b", "b/0", died="killed")
    assert (edge.drained("b"), edge.ended("b", "b/1")) == (False, False)


def test_an_open_edge_has_not_ended_when_empty(queue):
    assert not queue().drained("b")
    assert not queue().ended("b")


def test_an_edge_ends_for_each_consumer_by_itself(queue):
    edge = queue(("b", "c"), holds=1)
    edge.closed = True
    edge.ack("b", [0])
    assert (edge.ended("b"), edge.ended("c")) == (True, False)


def test_the_first_failure_stands_and_ends_the_edge(queue):
    edge = queue(holds=1)
    first, second = (Failure(stage=s, subject="", cause="") for s in ("a", "z"))
    edge.fail(first), edge.fail(second)
    assert edge.failure is first
    assert edge.ended("b")


# What it tells -------------------------------------------------------------------------------------------------------


def test_stats_tell_what_is_held_and_for_how_long(queue, clock):
    edge = queue(("b", "c"), holds=1)
    clock.now = 4.0
    edge.put(item(1))
    given(edge, 2), given(edge, 1, "c", holder="c/0")
    clock.now = 6.0
    stats = edge.stats()
    assert (stats.groups, stats.leased, stats.nbytes, stats.total_groups) == (2, 2, 20, 2)
    assert (stats.oldest_group, stats.oldest_age_s, stats.closed) == ("g0", 6.0, False)


def test_stats_of_an_empty_edge(queue):
    assert (queue().stats().oldest_group, queue().stats().oldest_age_s) == ("", 0.0)
