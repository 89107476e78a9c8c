from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollstream.graphs.orders import Orders

SOME = st.sets(st.integers(0, 12))


def members(orders: Orders) -> set[int]:
    return {order for order in range(30) if order in orders}


@given(st.lists(st.integers(0, 12)))
def test_it_has_what_was_added_in_any_order_and_number(added):
    orders = Orders()
    for order in added:
        orders.add(order)
    assert members(orders) == set(added)


@given(SOME, st.integers(0, 15))
def test_the_frontier_is_the_lowest_that_is_missing_and_nothing_is_kept_below_it(added, frontier):
    orders = Orders()
    for order in added:
        orders.add(order)
    orders.raise_to(frontier)
    assert members(orders) == added | set(range(frontier))
    assert orders.frontier not in orders
    assert all(order > orders.frontier for order in orders.ahead)


@given(SOME, st.integers(0, 15))
def test_counts_below_a_position(added, order):
    orders = Orders(0, added)
    assert orders.count_below(order) == sum(o < order for o in added)


def test_the_frontier_never_goes_back():
    orders = Orders(5, {7})
    orders.raise_to(2)
    assert (orders.frontier, orders.ahead) == (5, {7})
    orders.add(3)
    assert (orders.frontier, orders.ahead) == (5, {7})
