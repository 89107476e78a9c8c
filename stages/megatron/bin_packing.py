"""Lengths packed into as few bins as can be. Needs numbers only, no torch.

    tightest_first     each length, largest first, to the fullest bin that has room (best fit, decreasing)
    then fewer bins, by bisection down to `least_bins`:
        largest_first, differencing   equal sums: nothing packs better where the lengths' mean leaves a little room
        fullest_in_turn               one bin after another, each filled by a short search
    then even_out      equal sums in as many bins

Lengths fall and are at most `capacity`; an item is its place among them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from rollstream.stages.balance import differencing, even_out, largest_first, peaks

#: Items that one call of `fullest_in_turn` takes back, over all bins; each bin has at least so many.
_MAX_TAKEN_BACK, _MIN_TAKEN_BACK = 20_000, 10
#: A bin is full enough with this many times the room that a bin has on average.
_FULL_ENOUGH = 2.0


def fewest_bins(falling: Sequence[int], capacity: int, max_items: int) -> list[list[int]]:
    """Bins of at most `capacity` and `max_items`, nearly as few as can be, their sums nearly equal.

    >>> fewest_bins([9, 6, 4, 3, 2], 12, 5)
    [[0, 3], [1, 2, 4]]
    """
    if not falling:
        return []
    best = tightest_first(falling, capacity, max_items)
    low, high = least_bins(falling, capacity, max_items), len(best)
    while high - low > high // 1000:  # a thousandth of many bins is not worth another search
        num_bins = (low + high) // 2
        found = next(_packings(falling, num_bins, capacity, max_items), None)
        if found is None:
            low = num_bins + 1
        else:
            best, high = found, num_bins
    packings = [best, *_equal_sums(falling, len(best), capacity, max_items)]
    for bins in packings:
        even_out(bins, falling, max_items=max_items)
    return min(packings, key=lambda bins: peaks(bins, falling))


def least_bins(falling: Sequence[int], capacity: int, max_items: int) -> int:
    """No packing has fewer bins, by the lengths' sum, their number, and those of which no two go together.

    The last is Martello and Toth's bound L2 (1990): lengths above capacity - k leave no room for any of at least k.

    >>> least_bins([7, 7, 7, 4, 4], 10, 5), least_bins([1, 1, 1], 10, 2)
    (4, 2)
    """
    rising = falling[::-1]
    below = [0, *itertools.accumulate(rising)]
    half = bisect_right(rising, capacity // 2)
    num_large = len(rising) - half
    least = max(num_large, -(-below[-1] // capacity), -(-len(rising) // max_items))
    for k in sorted(set(rising[:half])):
        end = bisect_right(rising, capacity - k)
        room = (end - half) * capacity - (below[end] - below[half])
        small = below[half] - below[bisect_left(rising, k)]
        least = max(least, num_large - (room - small) // capacity)
    return least


def tightest_first(falling: Sequence[int], capacity: int, max_items: int) -> list[list[int]]:
    """
    >>> tightest_first([9, 6, 4, 3, 2], 12, 5)
    [[0, 3], [1, 2, 4]]
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of the bins that may take more; they rise
    for item, length in enumerate(falling):
        place = bisect_left(rooms, (length, 0))
        if place < len(rooms):
            room, chosen = rooms.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if len(bins[chosen]) < max_items:
            insort(rooms, (room - length, chosen))
    return bins


def _packings(falling: Sequence[int], num_bins: int, capacity: int, max_items: int) -> Iterator[list[list[int]]]:
    """Those found in exactly `num_bins`, the easiest to find first."""
    yield from _equal_sums(falling, num_bins, capacity, max_items)
    bins = fullest_in_turn(falling, num_bins, capacity, max_items)
    if len(bins) <= num_bins:
        yield bins


def _equal_sums(falling: Sequence[int], num_bins: int, capacity: int, max_items: int) -> Iterator[list[list[int]]]:
    if num_bins * max_items < len(falling):
        return
    yield from (
        bins
        for bins in (largest_first(falling, num_bins, max_items=max_items), differencing(falling, num_bins))
        if peaks(bins, falling)[0] <= capacity and max(map(len, bins)) <= max_items
    )


def fullest_in_turn(falling: Sequence[int], num_bins: int, capacity: int, max_items: int) -> list[list[int]]:
    """Each bin begins with the largest length that is left and takes what fills it best. `num_bins` is the number
    wished for: it says how much room each may keep. There may be more.

    >>> fullest_in_turn([6, 6, 4, 4, 2, 2], 2, 12, 6)
    [[0, 1], [2, 3, 4, 5]]
    """
    rising = list(falling[::-1])
    items = list(range(len(falling)))[::-1]
    patience = max(_MAX_TAKEN_BACK // num_bins, _MIN_TAKEN_BACK)
    total = sum(rising)
    bins: list[list[int]] = []
    while rising:
        num_left = num_bins - len(bins)
        room = max(num_left * capacity - total, 0) / max(num_left, 1)
        places = _fill(rising, capacity, max_items, enough=_FULL_ENOUGH * room, patience=patience)
        bins.append([items[place] for place in places])
        for place in places:  # they fall, so those to come stay where they are
            total -= rising[place]
            del rising[place], items[place]
    return bins


def _fill(rising: Sequence[int], capacity: int, max_items: int, *, enough: float, patience: int) -> list[int]:
    """Places, falling from the last, of lengths that leave no more room than `enough`; or else the best set that was
    found before `patience` lengths were taken back. Depth first, the largest that fits first, equal ones once."""
    end = len(rising) - 1
    chosen = [end]
    room = capacity - rising[end]
    best, best_room = chosen.copy(), room
    while best_room > enough:
        place = bisect_right(rising, room, 0, end) - 1
        if place >= 0 and len(chosen) < max_items:
            chosen.append(place)
            room -= rising[place]
            end = place
            if room < best_room:
                best, best_room = chosen.copy(), room
        elif len(chosen) > 1 and patience > 0:
            place = chosen.pop()
            room += rising[place]
            end = bisect_left(rising, rising[place], 0, place)
            patience -= 1
        else:
            break
    return best
