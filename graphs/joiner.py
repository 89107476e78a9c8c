"""The update stage's inlet: leases on all its input edges, joined by group, given out in the order of the prompts.

Only that order keeps `max_staleness`: group i was admitted for step i // groups_per_step, and a later step would find
it too old. A slow group holds up those after it; none is dropped. The driver holds references and counts only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rollstream.graphs.edge import Failure, Item
from rollstream.graphs.edge_actor import Lease
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.wait import get
from rollstream.stages.errors import PluginError, StageError

LEASE_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Joined:
    """One group, complete: what each input edge brought of it, in the order of the edges."""

    items: tuple[Item, ...]

    @property
    def group_id(self) -> str:
        return self.items[0].group_id

    @property
    def order(self) -> int:
        return self.items[0].order

    @property
    def version(self) -> int:
        return min(i.version for i in self.items)

    @property
    def nbytes(self) -> int:
        return max(i.nbytes for i in self.items)


class Joiner:
    """Keeps one lease call open on each edge and pairs what comes. Groups that `ledger` has as trained do not come."""

    def __init__(self, consumer: str, edges: Sequence[Any], *, at_most: int, ledger: Ledger):
        self._consumer = consumer
        self._edges = list(edges)
        self._at_most = at_most
        self._calls: dict[Any, int] = {}  # open call -> edge
        self._held: list[dict[str, Item]] = [{} for _ in edges]
        self._ended: set[int] = set()
        self._complete: dict[int, Joined] = {}  # by order
        self._ready: list[Joined] = []  # complete, and so are all before them
        ahead = frozenset(ledger.ahead)
        self._orders = (order for order in itertools.count(ledger.frontier) if order not in ahead)
        self._next = next(self._orders)

    def poll(self, timeout_s: float) -> int:
        """Takes what comes within `timeout_s`; the number of groups ready. Raises the first error of the run."""
        for index, edge in enumerate(self._edges):
            if index not in self._ended and index not in self._calls.values():
                call = edge.lease.remote(self._consumer, self._at_most, keep=True, timeout_s=LEASE_WAIT_S)
                self._calls[call] = index
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s) if self._calls else ([], [])
        for call in done:
            self._receive(self._calls.pop(call), get(call, "an edge of the update stage", timeout_s=LEASE_WAIT_S))
        return len(self._ready)

    def take(self, most: int) -> list[Joined]:
        """Up to `most` groups, in the order of their prompts."""
        taken, self._ready = self._ready[:most], self._ready[most:]
        return taken

    @property
    def ended(self) -> bool:
        """Whether no group can come any more."""
        return len(self._ended) == len(self._edges)

    def ack(self, groups: Sequence[Joined]) -> None:
        """These groups are trained. Not waited for: an edge that is gone shows at the next lease."""
        for edge in self._edges:
            edge.ack.remote(self._consumer, [g.group_id for g in groups])

    def _receive(self, index: int, lease: Lease) -> None:
        if lease.failure is not None:
            raise as_error(lease.failure)
        if lease.drained:
            self._ended.add(index)
        for item in lease.items:
            self._held[index][item.group_id] = item
            if all(item.group_id in held for held in self._held):
                self._complete[item.order] = Joined(items=tuple(held.pop(item.group_id) for held in self._held))
        while (joined := self._complete.pop(self._next, None)) is not None:
            self._ready.append(joined)
            self._next = next(self._orders)
        if self.ended:
            assert not any(self._held), f"groups came on some edges only: {self._held}"
            assert not self._complete, f"group {self._next} never came, these did: {sorted(self._complete)}"


def as_error(failure: Failure) -> StageError:
    """The failure as the error that the user gets."""
    kind = PluginError if failure.plugin else StageError
    return kind(failure.stage, failure.subject, failure.cause)
