"""The actors of one run: started, seated in a placement group, connected, and ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollstream.graphs import actors
from rollstream.graphs.colocation import device_bytes, with_sharing
from rollstream.graphs.edge_actor import EdgeActor, EdgeSettings
from rollstream.graphs.evaluation import Evaluation
from rollstream.graphs.evaluator import Evaluator
from rollstream.graphs.graph import Graph
from rollstream.graphs.host import Links, StageHost
from rollstream.graphs.turns import Turns
from rollstream.graphs.wait import ask, get, get_all
from rollstream.graphs.weights import make_weight_store
from rollstream.placement import Demand, Placement, Plan, Seat, check_cluster
from rollstream.stages.base import RolloutStage, Source, UpdateStage, World
from rollstream.stages.errors import PlacementError, ProcessDied

PLACE_S = 60.0
SETUP_S = 600.0
#: A checkpoint, an export or a publication of the weights.
COLLECTIVE_S = 1800.0


def demands(graph: Graph, placement: Placement) -> list[Demand]:
    """Processes that each stage of the graph needs: replicas times ranks; one for each evaluation."""
    stages = [
        Demand(
            stage=name,
            num_actors=stage.num_ranks * placement.replicas.get(name, 1),
            uses_device=stage.uses_device,
            num_devices=stage.devices_per_rank,
        )
        for name, stage in graph.stages.items()
    ]
    return stages + [Demand(stage=e.name, uses_device=True, num_devices=e.num_devices) for e in graph.evaluations]


def plan_on_cluster(graph: Graph, placement: Placement) -> Plan:
    """The plan for the cluster that Ray is connected to. Raises PlacementError if it can never be placed."""
    single = {name for name, stage in graph.stages.items() if isinstance(stage, Source | UpdateStage)}
    single |= {e.name for e in graph.evaluations}
    for name, count in placement.replicas.items():
        if count > 1 and name in single:
            raise PlacementError(
                f"stage {name!r} cannot have {count} replicas: sources, update stages and evaluations have one"
            )
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    plan = placement.plan(demands(graph, placement), cluster_gpus=sum(n.get("GPU", 0) for n in nodes))
    check_cluster(plan, nodes)
    return with_sharing(graph, placement, plan, device_bytes(placement, plan))


@dataclass
class Crew:
    """Handles of everything that runs."""

    graph: Graph
    plan: Plan
    group: Any
    hosts: dict[str, list[list[Any]]]  # stage -> replica -> rank
    evaluators: dict[str, Any]  # evaluation -> its process
    edges: dict[str, Any]  # producer -> edge
    store: Any
    turns: Turns = field(default_factory=Turns)
    weights_stay: bool = False  # known once all are set up

    @classmethod
    def start(cls, graph: Graph, plan: Plan, placement: Placement, edges: Sequence[EdgeSettings]) -> Crew:
        """Reserves the bundles and starts one actor a rank. Returns before any stage is set up."""
        group = _reserve(plan)
        hosts: dict[str, list[list[Any]]] = {}
        for name, stage in graph.stages.items():
            seats = iter(plan.seats[name])
            hosts[name] = [
                [_host(graph, name, rank, next(seats), group, plan.threads) for rank in range(stage.num_ranks)]
                for _ in range(placement.replicas.get(name, 1))
            ]
        evaluators = {e.name: _evaluator(e, plan.seats[e.name][0], group, plan.threads) for e in graph.evaluations}
        made = {e.producer: actors.start(EdgeActor, e, comes_back=True, max_concurrency=1000) for e in edges}
        return cls(graph, plan, group, hosts, evaluators, made, make_weight_store())

    def set_up(self) -> None:
        """Loads every stage, and connects it; the first error of any ends it. All at once, but where GPUs are shared
        engines come first and one after another: each measures what memory is left."""
        replicas = [(name, number) for name, replicas in self.hosts.items() for number in range(len(replicas))]
        hosts = [self.hosts[name][number] for name, number in replicas]
        addresses = get_all([ranks[0].address.remote() for ranks in hosts], "the actors' start", timeout_s=SETUP_S)
        at = dict(zip(replicas, addresses, strict=True))
        engines: list[Any] = [r for r in replicas if isinstance(self.graph.stages[r[0]], RolloutStage)]
        if self.plan.memory:
            for replica in engines:
                self._load({replica: at.pop(replica)})
            for evaluator in self.evaluators.values():
                get_all([evaluator.setup.remote()], "an evaluator's set-up", timeout_s=SETUP_S)
            self.rest()
        self._load(at)
        calls = [call for name, number in replicas for call in self._connect(name, number)]
        get_all(calls, "the stages' connection", timeout_s=PLACE_S)
        self.weights_stay = self._weights_stay()

    def _weights_stay(self) -> bool:
        """Whether all that sample can read the update stage's weights where they are."""
        update, rollout = self.graph.update, self.graph.rollout
        if rollout is None or not (update.shares_weights and rollout.reads_shared_weights):
            return False
        hosts = [self.updaters[0], *self._engines()]
        places = get_all([host.whereabouts.remote() for host in hosts], "the stages' places", timeout_s=PLACE_S)
        return len(places[0][1]) <= 1 and len(set(places)) == 1

    def _load(self, addresses: Mapping[tuple[str, int], tuple[str, int]]) -> None:
        calls = [
            host.setup.remote(*address) for (name, n), address in addresses.items() for host in self.hosts[name][n]
        ]
        if not self.plan.memory:
            calls += [evaluator.setup.remote() for evaluator in self.evaluators.values()]
        get_all(calls, "the stages' set-up", timeout_s=SETUP_S)

    def rest(self) -> None:
        """By turns, before the update stage works: the rollout engines give the GPUs back."""
        if self.plan.turns:
            self.turns.to_trainer(timeout_s=2 * SETUP_S)
            self._tell_engines("rest", timeout_s=SETUP_S)

    def wake(self) -> None:
        """By turns, before groups are waited for: the rollout engines may have the GPUs."""
        if self.plan.turns:
            self._tell_engines("wake", timeout_s=PLACE_S)
            self.turns.to_engines()

    def end_turns(self) -> None:
        """By turns, where the run ends: the update stage may have the GPUs for what it saves and exports. Groups that
        are under way are given up."""
        if self.plan.turns:
            self.turns.to_trainer(timeout_s=2 * SETUP_S)
            self._tell_engines("quit", timeout_s=SETUP_S)

    def _tell_engines(self, method: str, *, timeout_s: float) -> None:
        """All but those whose processes are being started again."""
        calls = [getattr(host, method).remote() for host in self._engines()]
        for call in calls:
            with suppress(ProcessDied):
                get(call, f"{method} of the rollout stage", timeout_s=timeout_s)

    def _engines(self) -> list[Any]:
        rollout = self.graph.rollout
        return [host for replica in (self.hosts[rollout.name] if rollout else ()) for host in replica]

    def set_up_again(self, stage: str, number: int) -> None:
        """Loads and connects one replica whose processes were started again; by turns, an engine in its own turn."""
        ranks = self.hosts[stage][number]
        what = f"the new process of {stage}"
        address = ask(lambda: ranks[0].address.remote(), what, timeout_s=SETUP_S)
        takes_turns = self.plan.turns and isinstance(self.graph.stages[stage], RolloutStage)
        with self.turns.loading() if takes_turns else nullcontext():
            get_all([host.setup.remote(*address) for host in ranks], what, timeout_s=SETUP_S)
        get_all(self._connect(stage, number), what, timeout_s=PLACE_S)

    def _connect(self, stage: str, number: int) -> list[Any]:
        inputs = list(self.graph.inputs_of(stage).values())
        ranks = self.hosts[stage][number]
        links = Links(
            inlet=self.edges[inputs[0]] if inputs else None,
            edges=self.edges,
            weights=self.store if self.graph.weights is not None else None,
            peers=tuple(ranks[1:]),
        )
        return [host.connect.remote(links) for host in ranks]

    @property
    def updaters(self) -> list[Any]:
        """All ranks of the update stage."""
        return self.hosts[self.graph.update.name][0]

    def publish(self, version: int, *, arrays: bool) -> None:
        """Sends the update stage's weights to the store; as arrays where these are asked for, or the only way."""
        if self.graph.weights is not None:
            stay = self.weights_stay
            self._collective("publish", self.store, version, shared=stay, arrays=arrays or not stay)

    def begin_save(self, folder: Path) -> list[Any]:
        """Returns once the update stage can go on: the calls, one of each rank, that end when `folder` is written."""
        self._collective("save", folder)
        return [rank.finish_save.remote() for rank in self.updaters]

    def load(self, folder: Path) -> None:
        self._collective("load", folder)

    def export(self, folder: Path) -> None:
        self._collective("export", folder)

    def stop(self) -> None:
        """Ends every actor of this run, and gives the bundles back."""
        self.turns.end()
        hosts = [h for replicas in self.hosts.values() for replica in replicas for h in replica]
        for actor in [*hosts, *self.evaluators.values(), *self.edges.values(), self.store]:
            actors.end(actor)
        remove_placement_group(self.group)

    def _collective(self, method: str, *args: Any, **settings: Any) -> None:
        calls = [getattr(rank, method).remote(*args, **settings) for rank in self.updaters]
        get_all(calls, f"{method} of {self.graph.update.name}", timeout_s=COLLECTIVE_S)


def _reserve(plan: Plan) -> Any:
    bundles = [{"CPU": b.cpus} | ({"GPU": b.gpus} if b.gpus else {}) for b in plan.bundles]
    group = placement_group(bundles, strategy=plan.strategy)
    if not group.wait(PLACE_S):
        remove_placement_group(group)
        free = ray.available_resources()
        raise PlacementError(
            f"the cluster did not give the bundles in {PLACE_S:g} s: free are {free.get('CPU', 0):g} CPU and "
            f"{free.get('GPU', 0):g} GPU, others hold the rest.\n{plan}"
        )
    return group


def _host(graph: Graph, stage: str, rank: int, seat: Seat, group: Any, threads: int) -> Any:
    found = graph.stages[stage]
    return actors.start(
        StageHost,
        found,
        World(rank=rank, size=found.num_ranks, threads=threads),
        comes_back=not isinstance(found, UpdateStage),  # its weights are in the last checkpoint only
        concurrency_groups={"control": 1, "feed": 1, "saving": 1, "life": 1},
        **_seated(seat, group),
    )


def _evaluator(evaluation: Evaluation, seat: Seat, group: Any, threads: int) -> Any:
    return actors.start(Evaluator, evaluation, threads, comes_back=True, **_seated(seat, group))


def _seated(seat: Seat, group: Any) -> dict[str, Any]:
    """Ray's options for an actor in this seat."""
    return {
        "num_cpus": seat.cpus,
        "num_gpus": seat.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, seat.bundle),
        "runtime_env": {"env_vars": _environment(seat)},
    }


def _environment(seat: Seat) -> dict[str, str]:
    """What a stage process needs set before its first import. Without a share of a GPU it must not see one: Ray would
    leave all of them in sight."""
    common = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return common if seat.gpus else common | {"CUDA_VISIBLE_DEVICES": ""}
