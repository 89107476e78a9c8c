"""The flow of groups through a crew's edges: begun, resumed, and mended where a process died.

begin      every edge refills from its journal; each then learns what the edges behind it have already
admit      up to which group the source's consumers may go
retire     groups that are trained or have left the graph are gone everywhere
mend_edge, renew_replica, mend_replica    processes that Ray started again take the place of dead ones
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollstream.graphs import actors
from rollstream.graphs.crew import Crew
from rollstream.graphs.ledger import Ledger, OpenGroup
from rollstream.graphs.stats import Whereabouts
from rollstream.graphs.wait import AGAIN_S, ask
from rollstream.stages.base import MapStage
from rollstream.stages.errors import ProcessDied, StalledError

#: An edge reads its journal, or answers.
EDGE_S = 300.0


class RowsLost(ProcessDied):
    """Rows that are needed are in no process and in no journal: only the last checkpoint helps."""


class Flow:
    """Moves the groups of one crew. Its methods may be called from several threads."""

    def __init__(self, crew: Crew, ledger: Ledger):
        self._crew, self._graph = crew, crew.graph
        self._ledger = ledger
        self._below = 0
        self._numbers = itertools.count()
        self._holders: dict[tuple[str, int], str] = {}  # (stage, replica) -> its name in leases
        self._gone: dict[str, list[str]] = {}  # stage -> names that count no more; a process may not have heard of it
        self._lock = threading.RLock()  # one mending at a time: each reads what the other edges have

    def begin(self, version: int) -> None:
        """Starts all edges: what their journals hold and may still be trained goes on from where it is."""
        held: dict[str, Mapping[int, str]] = {}
        for spec in self._graph.edges:
            edge = self._crew.edges[spec.producer]
            held[spec.producer] = self._begin(spec.producer, version)
            if isinstance(self._graph.stages[spec.producer], MapStage):
                before = held[self._inlet_of(spec.producer)]
                held[spec.producer] = self._ask(edge.keep, before)
        for spec in self._graph.edges:
            edge = self._crew.edges[spec.producer]
            for consumer in spec.consumers:
                if consumer in held:
                    self._ask(edge.mark, consumer, set(held[consumer]))
        for spec in self._graph.edges:
            self._open(spec.producer)

    def admit(self, below: int) -> None:
        """Lets the source's consumers take groups of orders below this. Not waited for: an edge that is away hears of
        it when it opens."""
        source = self._graph.source.name
        with self._lock:
            self._below = max(self._below, below)
            for consumer in self._consumers_of(source):
                self._crew.edges[source].admit.remote(consumer, self._below)

    def retire(self, orders: Sequence[int]) -> None:
        """These groups are closed in the ledger. Not waited for: an edge that is away hears of it when it begins."""
        for edge in self._crew.edges.values():
            edge.retire.remote(orders)

    def mend_edge(self, producer: str, version: int) -> None:
        """An edge that Ray started again refills, and is pulled for again. One that was out of reach only gets what
        it may have missed. Raises RowsLost where it lost rows that are needed."""
        edge = self._crew.edges[producer]
        with self._lock:
            if self._ask(edge.is_open):
                held: dict[int, str] = self._ask(edge.held)
                self._ask(edge.retire, [order for order in held if order in self._ledger.closed])
            else:
                held = self._begin(producer, version)
            for consumer in self._consumers_of(producer):
                if consumer in self._crew.edges:
                    theirs: dict[int, str] = self._ask(self._crew.edges[consumer].held)
                    self._check_whole(producer, held, consumer, theirs)
                    self._ask(edge.mark, consumer, set(theirs))
            if inputs := self._graph.inputs_of(producer):
                (inlet,) = inputs.values()
                self._ask(self._crew.edges[inlet].mark, producer, set(held))
            self._open(producer)

    def renew_replica(self, stage: str, number: int, died: str) -> None:
        """One process of a replica died: gives its groups out again at once, and waits until all its processes are
        new."""
        with self._lock:
            self._release(stage, number, died)
        for rank in self._crew.hosts[stage][number]:
            if self._ask(rank.is_set_up):
                actors.restart(rank)
        give_up = time.monotonic() + EDGE_S
        for rank in self._crew.hosts[stage][number]:
            while self._ask(rank.is_set_up):
                if time.monotonic() > give_up:
                    raise StalledError(f"a process of {stage} was ended and is there still, {EDGE_S:g} s later")
                time.sleep(AGAIN_S)

    def mend_replica(self, stage: str, number: int) -> None:
        """Loads the new processes of a replica, and pulls it."""
        self._crew.set_up_again(stage, number)
        with self._lock:
            self._pull(stage, number)

    def holder(self, name: str) -> tuple[str, int] | None:
        """The replica that has this name in leases."""
        return next((replica for replica, holder in self._holders.items() if holder == name), None)

    def under_way(self) -> list[OpenGroup]:
        """Every group that an edge holds and that is not closed, and how far it is."""
        edges = [spec.producer for spec in self._graph.edges]
        found = {p: self._ask(self._crew.edges[p].whereabouts) for p in edges}
        return open_groups(found, edges[0], self._graph.update.name, self._ledger)

    # -------------------------------------------------------------------------------------------------------------

    def _begin(self, producer: str, version: int) -> dict[int, str]:
        closed = self._ledger.closed
        retired = (closed.frontier, frozenset(closed.ahead))
        below = None if producer == self._graph.source.name else self._below
        return self._ask(self._crew.edges[producer].begin, self._crew.edges, retired, version, below)

    def _open(self, producer: str) -> None:
        edge = self._crew.edges[producer]
        for consumer in self._consumers_of(producer):
            for holder in self._gone.get(consumer, ()):
                self._ask(edge.release, consumer, holder, "")
        self._admit(producer)  # before anybody can take a group
        self._ask(edge.open)
        for number in range(len(self._crew.hosts[producer])):
            self._release(producer, number, "")
            self._pull(producer, number)

    def _admit(self, producer: str) -> None:
        if producer == self._graph.source.name:
            for consumer in self._consumers_of(producer):
                self._ask(self._crew.edges[producer].admit, consumer, self._below)

    def _release(self, stage: str, number: int, died: str) -> None:
        holder = self._holders.pop((stage, number), None)
        if holder is not None and self._graph.inputs_of(stage):
            self._gone.setdefault(stage, []).append(holder)
            self._ask(self._crew.edges[self._inlet_of(stage)].release, stage, holder, died)

    def _pull(self, stage: str, number: int) -> None:
        """Pulls a replica from where it is; whatever pulled it before counts no more."""
        self._release(stage, number, "")
        holder = self._holders[stage, number] = f"{stage}/{number}/{next(self._numbers)}"
        inlet = self._crew.edges[self._inlet_of(stage)] if self._graph.inputs_of(stage) else None
        if inlet is not None:
            inlet.expect.remote(stage, holder)
        self._crew.edges[stage].pull.remote(number, self._crew.hosts[stage][number][0], holder, inlet)

    def _consumers_of(self, producer: str) -> tuple[str, ...]:
        return next(spec.consumers for spec in self._graph.edges if spec.producer == producer)

    def _inlet_of(self, stage: str) -> str:
        (inlet,) = self._graph.inputs_of(stage).values()
        return inlet

    def _check_whole(self, producer: str, held: Mapping[int, str], consumer: str, theirs: Mapping[int, str]) -> None:
        if not isinstance(self._graph.stages[consumer], MapStage):
            return
        lost = [o for o, birth in theirs.items() if held.get(o) != birth and o not in self._ledger.closed]
        if lost:
            raise RowsLost(
                producer, "", f"the edge behind it died, and its journal lacks {len(lost)} groups that are under way"
            )

    def _ask(self, method: Any, *args: Any) -> Any:
        return ask(lambda: method.remote(*args), "an edge or a stage's process", timeout_s=EDGE_S)


def open_groups(
    found: Mapping[str, Iterable[Whereabouts]], source: str, update: str, ledger: Ledger
) -> list[OpenGroup]:
    """How far each group is that an edge holds and that is not closed, by what the edges say; `found` holds that by
    producer, sources first.

    >>> there = Whereabouts(order=0, group_id="g0", version=0, consumers={"rollout": "leased"})
    >>> [g.state for g in open_groups({"prompts": [there]}, "prompts", "actor_update", Ledger())]
    ['dispatched']
    """
    states: dict[int, OpenGroup] = {}
    for producer, groups in found.items():
        for group in groups:
            waits = all(state == "waiting" for state in group.consumers.values())
            state = "produced" if producer != source else "planned" if waits else "dispatched"
            if group.consumers.get(update) == "leased":
                state = "leased"
            if group.order not in ledger.closed:
                states[group.order] = OpenGroup(
                    order=group.order, group_id=group.group_id, state=state, version=group.version
                )
    return [states[order] for order in sorted(states)]
