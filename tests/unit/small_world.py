"""A whole graph in one process, without Ray, turned by hand: real edges, journals, flow, joiner and ledger between
stages that are stand-ins.

    prompts --> rollout --> score, ref --> [ join ] --> the trainer, which is `World` itself

The stand-ins are in small_processes.py. Calls between actors are tasks of one event loop; `pump` lets it run until it
rests. Whatever dies is started again at once, empty, and waits in `to_mend` for the flow to see to it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
from ray.exceptions import ActorUnavailableError
from small_processes import Brought, Edge, Host

from rollstream.graphs import attempt, edge_actor, flow, joiner
from rollstream.graphs.attempt import Attempt
from rollstream.graphs.edge_actor import EdgeSettings
from rollstream.graphs.flow import Flow
from rollstream.graphs.graph import Bounds, Graph
from rollstream.graphs.item import Item, Left, Part
from rollstream.graphs.joiner import Joined, Joiner
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.weights import Weights
from rollstream.stages.base import MapStage, RolloutStage, Source, UpdateStage
from rollstream.stages.schema import Prompted, Rollouts, Scored, Trained, WithRef

STEP, LEASE_S, MAX_GROUPS, MAX_BYTES = 2, 10.0, 3, 60
REPLICAS = {"prompts": 1, "rollout": 1, "score": 2, "ref": 1}
#: Turns of the event loop after which everything that can go on has gone on.
RESTS = 25


class Prompts(Source[Prompted]):
    rows = fingerprint = None


class Rollout(RolloutStage[Prompted, Rollouts]):
    submit = finished = load_weights = None
    groups_in_flight = 2


class Score(MapStage[Rollouts, Scored]):
    process = None


class Ref(MapStage[Rollouts, WithRef]):
    process = None


class Update(UpdateStage[Rollouts, Trained]):
    update = weights = save = load = export = share_of = data_parallel_size = None
    groups_per_step = STEP


def toy_graph(max_staleness: int = 1) -> Graph:
    rollouts = Rollout()(Prompts())
    output = Update()._wire(scored=Score()(rollouts), ref=Ref()(rollouts))
    weights = Weights(output, to=rollouts, max_staleness=max_staleness)
    return Graph("toy", output=output, weights=weights, bounds=Bounds(max_groups=MAX_GROUPS))


class World:
    """The run: its ledger, its last checkpoint, and `history`: how each closed group ended, in that order."""

    def __init__(
        self,
        folder: Path,
        *,
        num_groups: int = 8,
        max_staleness: int = 1,
        filtered: Collection[int] = (),
        poison: Collection[int] = (),
        max_bytes: int = MAX_BYTES,
    ):
        self.folder, self.num_groups, self.max_bytes = folder, num_groups, max_bytes
        self.filtered, self.poison = filtered, poison
        self.graph = toy_graph(max_staleness)
        self.loop = asyncio.new_event_loop()
        self.numbers = itertools.count()
        self.now = 0.0
        self._patches = ExitStack()
        self._patch()
        self.ledger, self.version = Ledger(), 0
        self.history: list[tuple[str, int]] = []
        self.save_of: Callable[[], tuple[Any, ...]] = lambda: (0, Ledger().to_json(), [])
        self.begin()

    def _patch(self) -> None:
        async def to_thread(do: Callable[..., Any], *args: Any) -> Any:
            return do(*args)

        clock = SimpleNamespace(monotonic=lambda: self.now)
        for place, name, stand_in in (
            (edge_actor, "ray", SimpleNamespace(put=Brought)),
            (edge_actor, "time", clock),
            (edge_actor, "EdgeMetrics", lambda name: mock.MagicMock()),
            (edge_actor, "fetch", lambda item, edges: pa.RecordBatch.from_pydict({"birth": [item.birth]})),
            (edge_actor.asyncio, "to_thread", to_thread),
            (attempt, "ask", lambda call, what, timeout_s: self.ask(call)),
            (flow, "ask", lambda call, what, timeout_s: self.ask(call)),
            (flow.actors, "restart", lambda host: host.die()),
            (joiner, "ray", SimpleNamespace(wait=self._wait, get=self._result)),
            (joiner, "get", lambda call, what, timeout_s: call.result()),
            (joiner, "AGAIN_S", 0),
        ):
            self._patches.enter_context(mock.patch.object(place, name, stand_in))

    def close(self) -> None:
        for edge in self.edges.values():
            edge.actor._journal and edge.actor._journal.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.pump()
        self.loop.close()
        self._patches.close()

    # Calls between actors ----------------------------------------------------------------------------------------

    def pump(self) -> None:
        async def rest() -> None:
            for _ in range(RESTS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(rest())

    def ask(self, call: Callable[[], Any]) -> Any:
        answer = call()
        return self.loop.run_until_complete(asyncio.wait_for(answer, 5)) if asyncio.isfuture(answer) else answer

    def _wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.pump()
        return [call for call in calls if call.done()], []

    def _result(self, call: Any, timeout: float) -> Any:
        if call.cancelled():
            raise ActorUnavailableError("it is being started again", None)
        return call.result()

    def made(self, order: int, birth: str, version: int, parts: tuple[Part, ...], stage: str) -> Any:
        nbytes = 10 + order * 7 % 20
        item = Item(
            group_id=f"g{order}",
            order=order,
            version=version,
            birth=birth,
            num_rows=1,
            parts=(*parts, Part(edge=stage, nbytes=nbytes)),
        )
        return item, pa.RecordBatch.from_pydict({"birth": [birth]})

    # The run -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All processes are new, as in an attempt that goes on from `self.ledger`."""
        self.to_mend: list[Any] = []
        self.step: list[Joined] = []  # that is being trained
        self._ended_holders: set[str] = set()
        self.hosts = {s: [Host(self, s, n) for n in range(count)] for s, count in REPLICAS.items()}
        self.edges = {spec.producer: Edge(self, self._settings(spec)) for spec in self.graph.edges}
        hosts = {stage: [[host] for host in hosts] for stage, hosts in self.hosts.items()}
        crew: Any = SimpleNamespace(graph=self.graph, edges=self.edges, hosts=hosts, set_up_again=self._load)
        self.flow = Flow(crew, self.ledger)
        inputs = [self.edges["score"], self.edges["ref"]]
        self.joiner = Joiner("update", inputs, at_most=STEP, ledger=self.ledger)
        self.flow.admit(self.below())
        self.flow.begin(self.version)
        self.pump()

    def _settings(self, spec: Any) -> EdgeSettings:
        return EdgeSettings(
            name=spec.name,
            producer=spec.producer,
            consumers=spec.consumers,
            num_producers=REPLICAS[spec.producer],
            max_groups=MAX_GROUPS,
            max_bytes=self.max_bytes,
            lease_s=LEASE_S,
            needed=STEP,
            max_deaths=2,
            folder=self.folder,
        )

    def _load(self, stage: str, number: int) -> None:
        self.hosts[stage][number].loaded = True

    def below(self) -> int:
        return self.ledger.below(self.graph.admitted(self.version))

    def look(self) -> None:
        """As the run's loop does about once a second."""
        look: Any = SimpleNamespace(
            crew=SimpleNamespace(edges=self.edges),
            ledger=self.ledger,
            flow=self.flow,
            joiner=self.joiner,
            _supervisor=SimpleNamespace(note=self._note),
            _on_left=self._on_left,
        )
        look._on_edge = lambda stats: Attempt._on_edge(look, stats)
        Attempt.settle(look)
        self.pump()

    def _note(self, stats: Any) -> None:
        for holder in set(stats.overdue) - self._ended_holders:
            self._ended_holders.add(holder)
            if (replica := self.flow.holder(holder)) is not None:
                self.kill_host(self.hosts[replica[0]][replica[1]])

    def _on_left(self, left: Left) -> None:
        self.history.append((left.kind, left.order))
        self.flow.admit(self.below())

    def begin_step(self) -> bool:
        """Takes a step's groups, fewer only at the end; false where they are not there yet."""
        if self.step or (self.joiner.poll(0) < STEP and not self.joiner.ended):
            return False
        self.step = self.joiner.take(STEP)
        for group in self.step:
            assert 0 <= self.version - group.version <= self.graph.weights.max_staleness
            for item in group.items:
                self._check_rows(item)
        return bool(self.step)

    def _check_rows(self, item: Item) -> None:
        """The rows of all parts can be had from the edges, and are of one birth."""
        for part in item.parts:
            edge = self.edges[part.edge]
            if edge.actor._opened:
                found = self.ask(lambda edge=edge: edge.part.remote(item.order, item.birth))
                assert found is not None, f"rows of {item.group_id} from {part.edge} are lost"
                assert found.ref.value[1]["birth"].to_pylist() == [item.birth]

    def end_step(self) -> None:
        orders = [group.order for group in self.step]
        self.step = []
        self.version += 1
        self.ledger.commit(orders)
        self.history += [("trained", order) for order in orders]
        self.flow.retire(orders)
        self.flow.admit(self.below())
        self.pump()

    def save(self) -> None:
        plain, version, history = self.ledger.to_json(self.flow.under_way()), self.version, list(self.history)
        self.save_of = lambda: (version, plain, list(history))

    # Deaths ------------------------------------------------------------------------------------------------------

    def kill_trainer(self) -> None:
        """Every process is ended with it; the run goes on from its last checkpoint."""
        for edge in self.edges.values():
            edge.die()
            edge.actor._journal and edge.actor._journal.close()
        self.version, plain, self.history = self.save_of()
        self.ledger = Ledger.from_json(plain)
        self.begin()

    def kill_host(self, host: Host) -> None:
        if host.loaded:
            host.die()
            self.to_mend.append(host)
            self.pump()

    def kill_edge(self, edge: Edge) -> None:
        edge.die()
        if edge not in self.to_mend:
            self.to_mend.append(edge)

    def mend(self, dead: Host | Edge) -> None:
        """As the supervisor does."""
        self.to_mend.remove(dead)
        if isinstance(dead, Host):
            self.flow.renew_replica(dead.stage, dead.number, "killed")
            self.flow.mend_replica(dead.stage, dead.number)
        else:
            dead.deaf = False
            self.flow.mend_edge(dead.settings.producer, self.version)
        self.pump()

    # Going on ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Every process does one thing."""
        for host in itertools.chain.from_iterable(self.hosts.values()):
            host.turn()
            self.pump()

    def finish(self, max_turns: int = 400) -> None:
        """Goes on fairly, without further deaths but those of the poisoned groups, until all is closed."""
        for _ in range(max_turns):
            for dead in list(self.to_mend):
                self.mend(dead)
            self.turn()
            self.look()
            if self.step or self.begin_step():
                self.end_step()
            elif self.joiner.ended:
                break
            self.now += LEASE_S / 50
        else:
            raise AssertionError(f"it goes on for ever: {self.history}, {self.flow.under_way()}")
        self.look()
