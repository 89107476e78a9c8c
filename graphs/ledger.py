"""Which groups are trained: what a resume must not repeat and must not skip.

>>> ledger = Ledger()
>>> ledger.commit([1, 2]); ledger.frontier, sorted(ledger.ahead)
(0, [1, 2])
>>> ledger.commit([0]); ledger.frontier, sorted(ledger.ahead)
(3, [])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Positions in the run's prompt sequence: all below `frontier` are trained, and those in `ahead`."""

    frontier: int = 0
    ahead: set[int] = field(default_factory=lambda: set())

    def commit(self, orders: Iterable[int]) -> None:
        """These groups are trained. A group trained twice is our own fault, and stops the run."""
        for order in orders:
            fresh = order >= self.frontier and order not in self.ahead
            assert fresh, f"group at {order} was trained before"
            self.ahead.add(order)
        while self.frontier in self.ahead:
            self.ahead.remove(self.frontier)
            self.frontier += 1
