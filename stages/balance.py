"""Items dealt to a fixed number of shares, so that the sums of their costs are as equal as can be.

    largest_first   each item, largest first, to the share with the smallest sum
    differencing    Karmarkar and Karp (1982): the two partial deals of the widest spread become one, again and again
    even_out        swaps between the fullest share and emptier ones, while they help

The first two make a deal, the third improves one. Their costs fall, and an item is its place among them: so a deal does
not depend on the order in which the items came.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

#: Emptier shares that are tried as partners of the fullest, and swaps of one call.
_MAX_PARTNERS, _MAX_SWAPS = 16, 1000

#: The sum of a share, and its items.
_Share = tuple[float, list[int]]


def balance(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Indices of `costs` in `num_shares` shares; each index once, rising in its share. The largest sum is kept small.

    No share is empty where there are as many items as shares. Shares come in the order of their first indices, empty
    ones last; equal costs give equal shares. Raises ValueError for less than one share.

    >>> balance([8, 7, 6, 5, 4], 2)
    [[0, 1], [2, 3, 4]]
    """
    if num_shares < 1:
        raise ValueError(f"num_shares must be at least 1, got {num_shares}")
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    falling = [costs[i] for i in order]
    deals = [differencing(falling, num_shares), largest_first(falling, num_shares)]
    for shares in deals:
        even_out(shares, falling)
    best = min(deals, key=lambda shares: (peaks(shares, falling), max(map(len, shares))))
    return sorted((sorted(order[i] for i in share) for share in best), key=lambda share: (not share, share))


def peaks(shares: Sequence[Sequence[int]], costs: Sequence[float]) -> list[float]:
    """The sums of all shares, largest first."""
    return sorted((sum(costs[i] for i in share) for share in shares), reverse=True)


def largest_first(falling: Sequence[float], num_shares: int, *, max_items: int | None = None) -> list[list[int]]:
    """Each item to the smallest sum; among equal ones to the fewest items. A share with `max_items` gets no more.

    >>> largest_first([8, 7, 6, 5, 4], 2)
    [[0, 3, 4], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    takers = [(0.0, 0, share) for share in range(num_shares)]
    for item, cost in enumerate(falling):
        total, num_items, share = takers[0]
        shares[share].append(item)
        if num_items + 1 == max_items:
            heapq.heappop(takers)
        else:
            heapq.heapreplace(takers, (total + cost, num_items + 1, share))
    return shares


def differencing(falling: Sequence[float], num_shares: int) -> list[list[int]]:
    """Begins with a deal of each item alone, and makes one of two until one is left.

    A deal is a list of shares whose sums rise, without its empty shares: so all of it takes O(n log n) in practice.

    >>> differencing([8, 7, 6, 5, 4], 2)
    [[0, 2], [1, 4, 3]]
    """
    heap: list[tuple[float, int, list[_Share]]] = [(-cost, item, [(cost, [item])]) for item, cost in enumerate(falling)]
    while len(heap) > 1:
        _, age, one = heapq.heappop(heap)
        merged = _merged(one, heap[0][2], num_shares)
        lowest = merged[0][0] if len(merged) == num_shares else 0
        heapq.heapreplace(heap, (lowest - merged[-1][0], age, merged))
    dealt = [items for _, items in heap[0][2]] if heap else []
    return [[] for _ in range(num_shares - len(dealt))] + dealt


def _merged(one: list[_Share], other: list[_Share], num_shares: int) -> list[_Share]:
    """The largest share of each meets the smallest of the other. Uses both up."""
    if len(one) < len(other):
        one, other = other, one
    num_met = max(len(one) + len(other) - num_shares, 0)  # the others meet an empty share
    pairs = zip(one[:num_met], reversed(other[:num_met]), strict=True)
    moved = [(low[0] + high[0], low[1] + high[1]) for low, high in pairs] + other[num_met:]
    del one[:num_met]
    if len(moved) > 4:
        return sorted(one + moved)
    for share in moved:
        insort(one, share)
    return one


def even_out(shares: list[list[int]], falling: Sequence[float], *, max_items: int | None = None) -> None:
    """Improves `shares` in place: the fullest gives an item for a smaller one, or for none.

    Neither partner comes to the sum that the fullest had, nor by it to more than `max_items`.
    """
    sums = sorted((sum(falling[i] for i in share), place) for place, share in enumerate(shares))
    for _ in range(_MAX_SWAPS):
        found = _best_swap(shares, falling, sums, max_items)
        if found is None:
            return
        rank, given, taken = found
        (highest, full), (total, partner) = sums[-1], sums[rank]
        shares[full].remove(given)
        shares[partner].append(given)
        if taken is not None:
            shares[partner].remove(taken)
            shares[full].append(taken)
        moved = _moved(falling, given, taken)
        del sums[-1], sums[rank]
        insort(sums, (highest - moved, full))
        insort(sums, (total + moved, partner))


def _best_swap(
    shares: Sequence[Sequence[int]], falling: Sequence[float], sums: Sequence[tuple[float, int]], max_items: int | None
) -> tuple[int, int, int | None] | None:
    """(the partner's place in `sums`, the item it gets, the item it gives) with the smallest larger sum after it.

    Looks no further than a partner that takes off a quarter of what it is behind.
    """
    highest, full = sums[-1]
    rising = sorted(shares[full], key=lambda i: falling[i])
    best, lowest = None, highest
    for rank, (total, partner) in enumerate(sums[: min(_MAX_PARTNERS, len(sums) - 1)]):
        gap = highest - total
        may_move = max_items is None or len(shares[partner]) < max_items
        for given, taken in _swaps(rising, shares[partner], falling, gap, may_move=may_move):
            moved = _moved(falling, given, taken)
            after = max(highest - moved, total + moved)
            if after < lowest:
                best, lowest = (rank, given, taken), after
        if highest - lowest >= gap / 4:
            break
    return best


def _swaps(
    rising: Sequence[int], partner: Sequence[int], falling: Sequence[float], gap: float, *, may_move: bool
) -> Iterator[tuple[int, int | None]]:
    """For each item of the partner, and for none, the two items of the fullest that come next to halving the gap."""
    for taken in (*partner, None) if may_move else partner:
        wanted = gap / 2 + (0 if taken is None else falling[taken])
        place = bisect_left(rising, wanted, key=lambda i: falling[i])
        for given in rising[max(place - 1, 0) : place + 1]:
            yield given, taken


def _moved(falling: Sequence[float], given: int, taken: int | None) -> float:
    return falling[given] - (0 if taken is None else falling[taken])
