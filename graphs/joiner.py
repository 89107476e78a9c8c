"""The update stage's inlet: leases on all its input edges, joined by group, given out in the order of the prompts.

Only that order keeps `max_staleness`: group i was admitted for step i // groups_per_step, and a later step would find
it too old. A slow group holds up those after it; none is dropped. The driver holds references and counts only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from rollstream.graphs.edge_actor import Lease
from rollstream.graphs.item import Failure, Item
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.wait import get
from rollstream.stages.errors import PluginError, StageError

LEASE_WAIT_S = 5.0
#: An edge that is being started again is asked so often.
AGAIN_S = 0.2
HOLDER = "run"


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
    def num_tokens(self) -> int:
        return self.items[0].num_tokens


class Joiner:
    """Keeps one lease call open on each edge and pairs what comes. Groups that `ledger` has as closed are passed over:
    those that leave on the way too."""

    def __init__(self, consumer: str, edges: Sequence[Any], *, at_most: int, ledger: Ledger):
        self._consumer = consumer
        self._edges = list(edges)
        self._at_most = at_most
        self._ledger = ledger
        self._calls: dict[Any, int] = {}  # open call -> edge
        self._held: list[dict[int, Item]] = [{} for _ in edges]
        self._ended: set[int] = set()
        self._complete: dict[int, Joined] = {}
        self._ready: list[Joined] = []  # complete, and so are all before them
        self._next = 0

    def poll(self, timeout_s: float) -> int:
        """Takes what comes within `timeout_s`, or without waiting where a step's groups are ready; the number of groups
        ready. Raises the first error of the run."""
        if len(self._ready) >= self._at_most:
            timeout_s = 0
        self.ask()
        for call in self._answered(timeout_s):
            index = self._calls.pop(call)
            try:
                ray.get(call, timeout=1)
            except ActorUnavailableError:  # it comes back, with all that it had
                time.sleep(AGAIN_S)
                continue
            except (RayActorError, RayTaskError):
                pass  # `get` below says what it means
            self._receive(index, get(call, f"an edge before {self._consumer}", timeout_s=1))
        self._advance()
        return len(self._ready)

    def ask(self) -> None:
        """Opens a call on each edge for what a step still lacks; the answers wait for `poll`."""
        for index, edge in enumerate(self._edges):
            if index not in self._ended and index not in self._calls.values():
                have = len(self._ready) + len(self._complete) + len(self._held[index])
                call = edge.lease.remote(
                    self._consumer,
                    self._at_most,
                    holder=HOLDER,
                    at_least=max(self._at_most - have, 1),
                    keep=True,
                    timeout_s=LEASE_WAIT_S,
                )
                self._calls[call] = index

    @property
    def ended(self) -> bool:
        """Whether no group will come that is not ready. One that came on some edges only is waited for: if it has left
        the graph, the ledger is yet to be told."""
        waiting = any(order not in self._ledger.closed for held in self._held for order in held)
        return len(self._ended) == len(self._edges) and not waiting and not self._complete

    def keeps(self, order: int) -> bool:
        """Whether this group is ready, or in the step that goes on: it is trained, whatever is heard of it."""
        return order < self._next and order not in self._ledger.closed

    def take(self, wanted: int) -> list[Joined]:
        """The next `wanted` groups, or all that are ready where there are fewer."""
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        return taken

    def _answered(self, timeout_s: float) -> list[Any]:
        """Open calls that have an answer, once there is one: all of them, so that new ones are opened at once."""
        if not self._calls:
            return []
        done, others = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if done and others:
            done += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return done

    def _receive(self, index: int, lease: Lease) -> None:
        if lease.failure is not None:
            raise as_error(lease.failure)
        if lease.drained:
            self._ended.add(index)
        for item in lease.items:
            order = item.order
            if order in self._ledger.closed:  # the edge was not there when this was told
                self._edges[index].retire.remote([order])
            elif order >= self._next and order not in self._complete:
                self._held[index][order] = item
                self._pair(order)

    def _pair(self, order: int) -> None:
        if all(order in held for held in self._held):
            joined = Joined(items=tuple(held.pop(order) for held in self._held))
            births = {item.birth for item in joined.items}
            assert len(births) == 1, f"{joined.group_id}: its columns are of {len(births)} samplings"
            self._complete[order] = joined

    def _advance(self) -> None:
        closed = self._ledger.closed
        while True:
            if self._next in closed:
                self._complete.pop(self._next, None)
            elif self._next in self._complete:
                self._ready.append(self._complete.pop(self._next))
            else:
                break
            self._next += 1


def as_error(failure: Failure) -> StageError:
    """The failure as the error that the user gets."""
    kind = PluginError if failure.plugin else StageError
    return kind(failure.stage, failure.subject, failure.cause)
