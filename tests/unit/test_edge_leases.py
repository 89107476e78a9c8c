"""Holders of leases that die or take too long: what is given again, and who is blamed."""

from __future__ import annotations

import pytest
from edge_toys import given, item

# Holders that die ----------------------------------------------------------------------------------------------------


def test_a_released_holder_gets_no_more_and_others_get_what_it_had(queue):
    edge = queue(holds=3)
    assert given(edge, 2, holder="b/0") == [0, 1]
    edge.release("b", "b/0")
    assert (given(edge, 2, holder="b/0"), edge.ended("b", "b/0")) == ([], True)
    assert given(edge, 8, holder="b/1") == [0, 1, 2]
    assert edge.stats().redelivered == 2


def test_what_another_holder_has_is_not_released(queue):
    edge = queue(holds=2)
    given(edge, 1, holder="b/0"), given(edge, 1, holder="b/1")
    edge.release("b", "b/0", died="killed")
    assert given(edge, 8, holder="b/2") == [0]


def test_a_group_whose_holder_died_is_given_alone(queue):
    edge = queue(holds=4)
    edge.ack("b", [0])
    given(edge, 2, holder="b/0")  # 1, 2
    edge.release("b", "b/0", died="killed")
    edge.lose([0]), edge.put(item(0))
    assert [given(edge, 8, holder=f"b/{n}", fill=True) for n in range(1, 5)] == [[0], [1], [2], []]


def test_a_group_that_takes_its_holder_down_too_often_is_set_aside(queue):
    edge = queue(holds=2)
    given(edge, 1, holder="b/0")
    assert edge.release("b", "b/0", died="signal 9") == []
    given(edge, 1, holder="b/1")
    (aside,) = edge.release("b", "b/1", died="signal 11")
    assert (aside.order, aside.group_id, aside.kind, aside.stage) == (0, "g0", "quarantined", "b")
    assert aside.reason == "b died 2 times while it had this group; the last time: signal 11"
    assert (edge.stats().left, given(edge, 8, holder="b/2")) == ((aside,), [1])
    edge.retire([0])
    assert edge.stats().left == ()


def test_deaths_are_counted_for_each_consumer(queue):
    edge = queue(("b", "c"), holds=1)
    for consumer in ("b", "c"):
        given(edge, 1, consumer, holder=f"{consumer}/0")
        assert edge.release(consumer, f"{consumer}/0", died="the node is gone") == []


def test_a_group_that_is_lost_and_made_again_begins_without_blame(queue):
    edge = queue(holds=1)
    for number in range(2):
        assert given(edge, 1, holder=f"b/{number}") == [0]
        assert edge.release("b", f"b/{number}", died="killed") == []
        edge.lose([0]), edge.put(item(0))


def test_a_holder_that_is_replaced_is_no_death(queue):
    edge = queue(holds=1)
    for number in range(5):
        assert given(edge, 1, holder=f"b/{number}") == [0]
        assert edge.release("b", f"b/{number}") == []


def test_a_group_that_its_holder_has_done_is_not_blamed_for_its_death(queue):
    """It may lie between the edges for long, where the next one is full."""
    edge = queue(holds=2)
    for number in range(2):
        assert given(edge, 1, holder=f"b/{number}") == [0]
        assert given(edge, 1, holder=f"b/{number}") == [1]
        aside = edge.release("b", f"b/{number}", died="killed")
    assert [left.order for left in aside] == [1]
    assert given(edge, 8, holder="b/2") == [0]


@pytest.mark.parametrize("fill", [False, True])
def test_a_holder_that_asked_in_vain_was_at_work_on_nothing(queue, fill):
    edge = queue(holds=1)
    given(edge, 1), given(edge, 1, fill=fill)
    edge.release("b", "b/0", died="killed")
    edge.put(item(1))
    assert given(edge, 8, holder="b/1") == [0, 1]


# Time ----------------------------------------------------------------------------------------------------------------


def test_a_lease_that_ran_out_is_given_again_first_and_its_holder_told_of(queue, clock):
    edge = queue(holds=3)
    given(edge, 2)
    clock.now = 59.9
    assert (edge.expire(), edge.stats().overdue) == ([], ())
    clock.now = 60.0
    assert (edge.expire(), edge.stats().overdue) == ([], ("b/0",))
    assert [given(edge, 8, holder=f"b/{n}") for n in (1, 2, 3)] == [[0], [1], [2]]
    edge.release("b", "b/0", died="killed")
    assert (edge.stats().overdue, edge.stats().redelivered) == ((), 2)


def test_a_group_whose_leases_ran_out_too_often_is_set_aside_and_told_once(queue, clock):
    edge = queue(holds=1)
    aside = []
    for number in range(3):
        given(edge, 1, holder=f"b/{number}")
        clock.now += 60.0
        aside.append(edge.expire())
    assert [len(some) for some in aside] == [0, 1, 0]
    assert "the last time: it did not finish in 60 s" in aside[1][0].reason


def test_a_group_that_waits_for_room_is_given_again_and_nobody_blamed(queue, clock):
    """Its ack was lost, perhaps."""
    edge = queue(holds=2)
    for _ in range(3):
        assert given(edge, 1) == [0]
        given(edge, 1)
        clock.now += 60.0
        edge.ack("b", [1])
        assert (edge.expire(), edge.stats().overdue) == ([], ())


def test_leases_that_are_renewed_run_on(queue, clock):
    edge = queue(holds=2)
    given(edge, 1, holder="b/0"), given(edge, 1, holder="b/1")
    clock.now = 30.0
    edge.renew("b", "b/0")
    clock.now = 60.0
    edge.expire()
    assert edge.stats().overdue == ("b/1",)
    clock.now = 90.0
    edge.expire()
    assert edge.stats().overdue == ("b/0", "b/1")


def test_a_late_ack_counts(queue, clock):
    edge = queue(holds=1)
    given(edge, 1)
    clock.now = 60.0
    edge.expire()
    edge.ack("b", [0])
    assert given(edge, 1, holder="b/1") == []


# Holders that take groups while they have others ---------------------------------------------------------------------


def test_holders_share_equally_what_waits(queue):
    edge = queue(holds=5)
    for holder in ("b/0", "b/1"):
        edge.expect("b", holder)
    assert given(edge, 8, holder="b/0", share=True) == [0, 1, 2]
    assert given(edge, 8, holder="b/0", holding=[0, 1, 2], share=True) == []
    assert given(edge, 8, holder="b/1", share=True) == [3, 4]


def test_a_holder_that_is_gone_has_no_share(queue):
    edge = queue(holds=4)
    for holder in ("b/0", "b/1"):
        edge.expect("b", holder)
    edge.release("b", "b/0", died="killed")
    assert given(edge, 8, holder="b/1", share=True) == [0, 1, 2, 3]


def test_a_suspect_is_given_to_a_holder_of_no_other_and_then_nothing_more(queue):
    edge = queue(holds=3)
    given(edge, 1, holder="b/0")
    edge.release("b", "b/0", died="killed")
    edge.ack("b", [1])
    assert given(edge, 8, holder="b/1", holding=[1]) == []
    assert given(edge, 8, holder="b/1") == [0]
    assert given(edge, 8, holder="b/1", holding=[0]) == []


def test_a_group_that_its_holder_has_done_is_not_blamed(queue):
    edge = queue(holds=2)
    assert given(edge, 2, holder="b/0") == [0, 1]
    given(edge, 2, holder="b/0", holding=[1])  # 0 is done, and on its way
    edge.release("b", "b/0", died="killed")
    assert given(edge, 8, holder="b/1") == [0]
    assert edge.release("b", "b/1", died="killed") == []
    assert given(edge, 8, holder="b/2") == [0]
    assert [left.order for left in edge.release("b", "b/2", died="killed")] == [0]
