"""Deals to a fixed number of shares, against the best there is."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.stages.balance import balance, differencing, even_out, largest_first, peaks

COSTS = st.lists(st.integers(0, 1000), max_size=40)
SHARES = st.integers(1, 9)


def smallest_peak(costs: list[int], num_shares: int) -> int:
    """By all ways to deal."""
    ways = itertools.product(range(num_shares), repeat=len(costs))
    return min(
        max(sum(c for c, w in zip(costs, way, strict=True) if w == s) for s in range(num_shares)) for way in ways
    )


@given(COSTS, SHARES)
def test_every_item_is_in_one_share_in_rising_order(costs, num_shares):
    shares = balance(costs, num_shares)
    assert len(shares) == num_shares
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)


@given(COSTS, SHARES)
def test_no_share_is_empty_where_there_are_enough_items(costs, num_shares):
    assert sum(not share for share in balance(costs, num_shares)) == max(num_shares - len(costs), 0)


@given(COSTS, SHARES)
def test_the_largest_sum_is_never_above_that_of_the_plain_deal(costs, num_shares):
    falling = sorted(costs, reverse=True)
    plain = peaks(largest_first(falling, num_shares), falling)
    assert peaks(balance(costs, num_shares), costs)[0] <= plain[0]


@given(COSTS, SHARES, st.randoms(use_true_random=False))
def test_the_sums_do_not_depend_on_the_order_of_the_items(costs, num_shares, rng):
    shuffled = rng.sample(costs, len(costs))
    assert peaks(balance(costs, num_shares), costs) == peaks(balance(shuffled, num_shares), shuffled)


def test_the_largest_sum_is_close_to_the_smallest_possible():
    rng = random.Random(0)
    sets = [([int(rng.lognormvariate(6, 0.7)) for _ in range(7)], 3) for _ in range(25)]
    peak = sum(peaks(balance(costs, num_shares), costs)[0] for costs, num_shares in sets)
    assert peak <= 1.01 * sum(smallest_peak(costs, num_shares) for costs, num_shares in sets)


def test_many_items_are_dealt_evenly():
    rng = random.Random(0)
    costs = [rng.lognormvariate(6, 0.7) for _ in range(2000)]
    assert peaks(balance(costs, 64), costs)[0] <= 1.0001 * sum(costs) / 64


def test_items_without_cost_are_dealt_by_number():
    assert [len(share) for share in balance([0] * 12, 4)] == [3, 3, 3, 3]


def test_differencing_keeps_what_the_greedy_deal_loses():
    """8 + 7 + 6 + 5 + 4 is 15 + 15; greedy gives 17 + 13, differencing 16 + 14."""
    assert peaks(largest_first([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4]) == [17, 13]
    assert peaks(differencing([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4]) == [16, 14]
    assert balance([8, 7, 6, 5, 4], 2) == [[0, 1], [2, 3, 4]]


@given(COSTS, SHARES, st.integers(1, 5))
def test_evening_out_lowers_the_peak_and_overfills_no_share(costs, num_shares, max_items):
    falling = sorted(costs, reverse=True)
    before = largest_first(falling[: num_shares * max_items], num_shares, max_items=max_items)
    after = [list(share) for share in before]
    even_out(after, falling, max_items=max_items)
    assert sorted(itertools.chain(*after)) == sorted(itertools.chain(*before))
    assert peaks(after, falling) <= peaks(before, falling)
    assert max(map(len, after)) <= max_items


def test_evening_out_swaps_and_moves():
    shares = [[0, 1, 2], []]
    even_out(shares, [5, 3, 2])
    assert peaks(shares, [5, 3, 2]) == [5, 5]
    shares = [[0, 2], [3, 4]]
    even_out(shares, [9, 8, 5, 4, 3], max_items=2)
    assert peaks(shares, [9, 8, 5, 4, 3]) == [12, 9]


def test_shares_come_in_the_order_of_their_first_items_and_empty_ones_last():
    assert balance([3, 9, 1], 5) == [[0], [1], [2], [], []]
    assert balance([1, 9, 2, 8], 2) == [[0, 1], [2, 3]]


def test_evening_out_moves_nothing_to_a_share_that_is_full():
    shares = [[0, 1], [2, 3]]
    even_out(shares, [9, 4, 1, 1], max_items=2)
    assert peaks(shares, [9, 4, 1, 1]) == [10, 5]


def test_there_must_be_a_share():
    with pytest.raises(ValueError, match="num_shares must be at least 1, got 0"):
        balance([1, 2], 0)
