"""Watches over the processes of a crew, and has those that die replaced.

    a stage's process     Ray starts it again; it is set up, its groups are given out again
    an edge               Ray starts it again; it refills from its journal
    the weight store      Ray starts it again; the weights are published again when the update stage is free
    the update stage's    its weights are in the last checkpoint only: ProcessDied, and the run goes back there

A stage may die `max_restarts` times without a finished step in between, each start later than the one before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from rollstream.graphs import actors
from rollstream.graphs.crew import Crew
from rollstream.graphs.flow import Flow, RowsLost
from rollstream.graphs.stats import EdgeStats
from rollstream.stages.errors import ProcessDied, StageError

BACK_OFF_S = 0.25
MAX_BACK_OFF_S = 15.0


@dataclass(frozen=True)
class Member:
    """One process of a crew."""

    kind: str  # stage | edge | store
    name: str  # of the stage, or of the stage before the edge
    replica: int = 0
    rank: int = 0

    def same_replica(self, other: Member) -> bool:
        return (self.kind, self.name, self.replica) == (other.kind, other.name, other.replica)

    def __str__(self) -> str:
        names = {"stage": f"stage {self.name}", "edge": f"the edge behind {self.name}", "store": "the weight store"}
        return names[self.kind]


class Supervisor:
    """Looked at by the run's loop, as often as it waits; what takes long is done in threads of its own."""

    def __init__(
        self,
        crew: Crew,
        flow: Flow,
        *,
        max_restarts: int,
        tell: Callable[[str], None],
        restarted: Callable[[str], None],
    ):
        self.must_publish = False
        self._crew, self._flow = crew, flow
        self._max_restarts = max_restarts
        self._tell, self._restarted = tell, restarted
        self._deaths: Counter[Member] = Counter()
        self._lives: dict[Any, Member] = {}  # call that ends with the process
        self._mending: dict[Member, Future[dict[Any, Member]]] = {}
        self._ended: set[str] = set()  # holders whose processes were ended here
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="mend")
        for member, actor in self._members():
            self._lives[actor.stay.remote()] = member

    def look(self, version: int) -> None:
        """Begins to replace what has died. Raises ProcessDied where only the last checkpoint helps, StageError for a
        stage that died too often or whose new process does not load."""
        done, _ = ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)
        for call in done:
            if (member := self._lives.pop(call, None)) is not None:
                self._on_death(member, _why(call), version)
        for member, mending in list(self._mending.items()):
            if mending.done():
                del self._mending[member]
                self._on_mended(member, mending, version)

    def note(self, stats: EdgeStats) -> None:
        """A process that has held a group for longer than a lease is taken for hung, and ended."""
        for holder in set(stats.overdue) - self._ended:
            self._ended.add(holder)
            if (replica := self._flow.holder(holder)) is not None:
                stage, number = replica
                self._tell(f"stage {stage} has held a group for longer than its lease: its process is ended")
                actors.restart(self._crew.hosts[stage][number][0])

    def step_done(self) -> None:
        """The run goes forward: what died before counts no more."""
        self._deaths.clear()

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _on_death(self, member: Member, why: str, version: int) -> None:
        if member.kind == "stage" and member.name == self._crew.graph.update.name:
            raise ProcessDied(member.name, "", f"its process died: {why}")
        dead = Member(member.kind, member.name, member.replica)
        for call in [c for c, other in self._lives.items() if other.same_replica(dead)]:
            del self._lives[call]  # the other ranks of the replica are started again with it
        self._count(dead, why)
        delay_s = min(BACK_OFF_S * 2 ** (self._deaths[dead] - 1), MAX_BACK_OFF_S)
        self._tell(f"{dead} died and is started again: {_first_line(why)}")
        self._restarted(dead.name)
        self._mending[dead] = self._threads.submit(self._mend, dead, why, version, delay_s)

    def _count(self, dead: Member, why: str) -> None:
        self._deaths[dead] += 1
        if self._deaths[dead] > self._max_restarts:
            times = f"{dead} died {self._deaths[dead]} times without a finished step in between"
            raise StageError(dead.name, "", f"{times} (max_restarts={self._max_restarts}). The last time: {why}")

    def _mend(self, dead: Member, why: str, version: int, delay_s: float) -> dict[Any, Member]:
        """Waits for the new processes and puts them to work. They are watched from before that, so that their own
        death is seen: the calls that will tell of it."""
        time.sleep(delay_s)
        if dead.kind == "stage":
            self._flow.renew_replica(dead.name, dead.replica, why)
        lives = {actor.stay.remote(): other for other, actor in self._members() if other.same_replica(dead)}
        if dead.kind == "stage":
            self._flow.mend_replica(dead.name, dead.replica)
        elif dead.kind == "edge":
            self._flow.mend_edge(dead.name, version)
        return lives

    def _on_mended(self, member: Member, mending: Future[dict[Any, Member]], version: int) -> None:
        try:
            self._lives |= mending.result()
        except RowsLost:
            raise
        except ProcessDied as error:  # once more, before it was back
            self._on_death(member, str(error), version)
        if member.kind == "store":
            self.must_publish = True

    def _members(self) -> Iterator[tuple[Member, Any]]:
        for stage, replicas in self._crew.hosts.items():
            for number, ranks in enumerate(replicas):
                for rank, host in enumerate(ranks):
                    yield Member("stage", stage, number, rank), host
        for producer, edge in self._crew.edges.items():
            yield Member("edge", producer), edge
        if self._crew.graph.weights is not None:
            yield Member("store", "weights"), self._crew.store


def _why(call: Any) -> str:
    try:
        ray.get(call, timeout=1)
    except ActorUnavailableError:
        return "its process ended without a word: killed, out of memory, or a crash outside Python"
    except RayActorError as error:
        return str(error)
    raise AssertionError("a call that never answers has answered")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason is known"
