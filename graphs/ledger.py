"""Where every group is, exactly once: what a resume must not repeat and must not skip.

    planned -> dispatched -> produced -> leased -> trained | filtered | quarantined

The last three are for good, and are here as they happen. The others are read off the edges when the ledger is saved:
`planned` waits for the rollout, `dispatched` is with it, `produced` is in an edge behind it, `leased` is at the update
stage's door. Groups are trained in the order of their prompts, so counts of groups by step say who was trained when.

>>> ledger = Ledger()
>>> ledger.commit([0, 1]); ledger.leave(Left(order=2, group_id="g2", kind="filtered", stage="reward", reason="equal"))
>>> ledger.commit([3, 4]); ledger.closed.frontier, ledger.step_of(1), ledger.step_of(3), ledger.step_of(2)
(5, 1, 2, None)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.graphs.item import Left
from rollstream.graphs.orders import Orders


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """A group under way."""

    order: int
    group_id: str
    state: str  # planned | dispatched | produced | leased
    version: int  # weights that began it; 0 where none did yet


@dataclass
class Ledger:
    """Small whatever the length of the run: a frontier, the few groups beyond it, runs of equal steps."""

    #: Trained, filtered and quarantined groups.
    closed: Orders = field(default_factory=Orders)
    left: dict[int, Left] = field(default_factory=lambda: {})
    #: (groups, steps in a row that trained so many).
    steps: list[tuple[int, int]] = field(default_factory=lambda: [])

    def commit(self, orders: Sequence[int]) -> None:
        """These groups were trained as the next step. A group closed twice is our own fault, and stops the run."""
        for order in orders:
            self._close(order)
        groups, times = self.steps.pop() if self.steps else (len(orders), 0)
        if groups == len(orders):
            self.steps.append((groups, times + 1))
        else:
            self.steps += [(groups, times), (len(orders), 1)]

    def leave(self, left: Left) -> None:
        """This group will not be trained."""
        self._close(left.order)
        self.left[left.order] = left

    def below(self, num_groups: int) -> int:
        """The order below which so many groups are, those left out that will not be trained."""
        order = num_groups
        for left in sorted(self.left):
            order += left < order
        return order

    def step_of(self, order: int) -> int | None:
        """The step that trained this group, counted from 1; None where none did."""
        if order not in self.closed or order in self.left:
            return None
        place = order - sum(1 for left in self.left if left < order)
        step = 0
        for groups, times in self.steps:
            if place < groups * times:
                return step + place // groups + 1
            place -= groups * times
            step += times
        raise AssertionError(f"group {order} is closed, and in no step")

    def to_json(self, under_way: Iterable[OpenGroup] = ()) -> dict[str, Any]:
        return {
            "frontier": self.closed.frontier,
            "ahead": sorted(self.closed.ahead),
            "steps": [list(run) for run in self.steps],
            "left": [dataclasses.asdict(left) for left in self.left.values()],
            "open": [dataclasses.asdict(group) for group in under_way],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Ledger:
        """What `to_json` gave. Groups that were under way are for the reader: they are still to be trained."""
        left = [Left(**entry) for entry in plain["left"]]
        return cls(
            closed=Orders(plain["frontier"], plain["ahead"]),
            left={entry.order: entry for entry in left},
            steps=[(groups, times) for groups, times in plain["steps"]],
        )

    def _close(self, order: int) -> None:
        assert order not in self.closed, f"group at {order} was closed before"
        self.closed.add(order)
