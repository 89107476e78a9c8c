"""A set of positions in the run's prompt sequence that fills up from below, in little memory."""

from __future__ import annotations

from collections.abc import Iterable


class Orders:
    """All positions below `frontier`, and those in `ahead`.

    >>> done = Orders()
    >>> done.add(1); done.add(2); done.frontier, sorted(done.ahead)
    (0, [1, 2])
    >>> done.add(0); done.frontier, sorted(done.ahead), 2 in done, 3 in done
    (3, [], True, False)
    """

    def __init__(self, frontier: int = 0, ahead: Iterable[int] = ()):
        self.frontier = frontier
        self.ahead = set(ahead)

    def add(self, order: int) -> None:
        if order >= self.frontier:
            self.ahead.add(order)
        self._advance()

    def raise_to(self, frontier: int) -> None:
        """All positions below `frontier` are in the set."""
        self.frontier = max(self.frontier, frontier)
        self.ahead = {order for order in self.ahead if order >= self.frontier}
        self._advance()

    def __contains__(self, order: int) -> bool:
        return order < self.frontier or order in self.ahead

    def count_below(self, order: int) -> int:
        """How many of the positions below `order` are in the set."""
        return min(self.frontier, order) + sum(1 for o in self.ahead if o < order)

    def _advance(self) -> None:
        while self.frontier in self.ahead:
            self.ahead.remove(self.frontier)
            self.frontier += 1
