from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.graphs.item import Left
from rollstream.graphs.ledger import Ledger, OpenGroup


def left(order: int) -> Left:
    return Left(order=order, group_id=f"g{order}", kind="filtered", stage="reward", reason="dull")


def ledger_of(steps: list[int], gone: set[int]) -> tuple[Ledger, dict[int, int]]:
    """A run whose steps trained so many groups each, and where `gone` left; and the step of each trained group."""
    ledger, step_of, order = Ledger(), {}, 0
    for step, size in enumerate(steps, start=1):
        orders: list[int] = []
        while len(orders) < size:
            if order in gone:
                ledger.leave(left(order))
            else:
                orders.append(order)
            order += 1
        ledger.commit(orders)
        step_of |= dict.fromkeys(orders, step)
    return ledger, step_of


RUNS = {"steps": st.lists(st.integers(1, 4), max_size=8), "gone": st.sets(st.integers(0, 20))}


@given(**RUNS)
def test_it_knows_which_step_trained_a_group(steps, gone):
    ledger, step_of = ledger_of(steps, gone)
    assert {order: ledger.step_of(order) for order in range(40)} == {o: step_of.get(o) for o in range(40)}


@given(**RUNS)
def test_what_is_saved_comes_back(steps, gone):
    ledger, step_of = ledger_of(steps, gone)
    again = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert again.to_json() == ledger.to_json()
    assert {order: again.step_of(order) for order in range(40)} == {o: step_of.get(o) for o in range(40)}


@given(RUNS["gone"], st.integers(0, 20))
def test_below_counts_the_groups_that_are_or_may_be_trained(gone, num_groups):
    ledger = Ledger()
    for order in gone:
        ledger.leave(left(order))
    below = ledger.below(num_groups)
    assert sum(order not in gone for order in range(below)) == num_groups
    assert below - 1 not in gone


def test_a_group_that_leaves_late_changes_no_step():
    ledger = Ledger()
    ledger.commit([0, 1])
    ledger.leave(left(7)), ledger.leave(left(2))
    ledger.commit([3, 4])
    assert [ledger.step_of(order) for order in range(6)] == [1, 1, None, 2, 2, None]


def test_it_stays_small():
    ledger = Ledger()
    for step in range(1000):
        ledger.commit([2 * step, 2 * step + 1])
    assert ledger.steps == [(2, 1000)]
    assert len(json.dumps(ledger.to_json())) < 100


@pytest.mark.parametrize("again", [lambda led: led.commit([1]), lambda led: led.leave(left(1))])
@pytest.mark.parametrize("before", [lambda led: led.commit([1]), lambda led: led.leave(left(1))])
def test_a_group_closed_twice_is_refused(before, again):
    ledger = Ledger()
    before(ledger)
    with pytest.raises(AssertionError, match="group at 1 was closed before"):
        again(ledger)


def test_a_group_twice_in_one_step_is_refused():
    with pytest.raises(AssertionError, match="group at 1"):
        Ledger().commit([1, 1])


def test_groups_under_way_are_saved_for_the_reader_only():
    group = OpenGroup(order=3, group_id="g3", state="produced", version=2)
    plain = Ledger().to_json([group])
    assert plain["open"] == [{"order": 3, "group_id": "g3", "state": "produced", "version": 2}]
    assert 3 not in Ledger.from_json(plain).closed
