"""Where the actors of a graph sit: bundles of a Ray placement group, and who shares which.

    Placement.auto()                     one bundle; a GPU in it if the cluster has one
    Placement.colocated(cpus=2, gpus=1)  all stages share one bundle, by equal shares
    Placement.spread()                   a bundle for each stage
    Placement.fixed(bundles, stages)     each stage where you say

A placement is a value that knows no algorithm; `plan` turns it into seats for the actors of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from rollstream.stages.errors import PlacementError
from rollstream.stages.names import known_names

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
#: How stages share a GPU, see sharing.py.
Sharing = Literal["auto", "side_by_side", "turns"]


@dataclass(frozen=True)
class Bundle:
    """Resources that Ray reserves together on one node."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if min(self.cpus, self.gpus) < 0 or self.cpus + self.gpus == 0:
            raise PlacementError(f"a bundle has CPUs or GPUs, and none below 0; got cpus={self.cpus}, gpus={self.gpus}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise PlacementError(f"gpus above 1 must be a whole number, got {self.gpus}")

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU" + (f" + {self.gpus:g} GPU" if self.gpus else "")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one stage needs: `num_actors` processes, with or without a device; several devices it needs whole."""

    stage: str
    num_actors: int = 1
    uses_device: bool = False
    num_devices: int = 1


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One actor's place and its share of the bundle."""

    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A placement worked out for one graph: seats by stage, in order of replica and rank."""

    bundles: tuple[Bundle, ...]
    strategy: Strategy
    seats: Mapping[str, tuple[Seat, ...]]
    threads: int
    #: Whether generation and training take turns on a GPU that they share.
    turns: bool = False
    #: What is on each GPU, by estimate, for people; empty without one.
    memory: str = ""

    def __str__(self) -> str:
        lines = [f"placement ({self.strategy})"]
        for index, bundle in enumerate(self.bundles):
            here = [
                f"{stage}[{rank}]" if len(seats) > 1 else stage
                for stage, seats in self.seats.items()
                for rank, seat in enumerate(seats)
                if seat.bundle == index
            ]
            lines.append(f"  bundle {index} ({bundle}): {', '.join(here)}")
        if self.memory:
            lines += ["memory", self.memory]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How to seat the stages of any graph."""

    #: The bundles, or None: one for each stage.
    bundles: tuple[Bundle, ...] | None = (Bundle(),)
    #: Bundle of each stage: one number for all its actors, or one for each. Stages left out sit in bundle 0.
    stages: Mapping[str, int | Sequence[int]] = field(default_factory=lambda: {})
    #: How Ray lays bundles over nodes.
    strategy: Strategy = "PACK"
    #: Interchangeable copies of a rollout or map stage.
    replicas: Mapping[str, int] = field(default_factory=lambda: {})
    #: Compute threads of each actor that runs a model on the CPU; 0: all cores of its machine, shared by its ranks.
    threads: int = 0
    #: A bundle with a GPU is asked for where the cluster has one.
    find_gpu: bool = False
    #: How the rollout and the update share a GPU: "side_by_side", by "turns", or "auto", by the estimate of memory.
    sharing: Sharing = "auto"
    #: Memory of one GPU in GB (1e9 bytes); None asks the cluster.
    device_gb: float | None = None

    def __post_init__(self) -> None:
        faults = [f"replicas of {stage!r} must be at least 1, got {n}" for stage, n in self.replicas.items() if n < 1]
        if self.bundles is not None and not self.bundles:
            faults.append("bundles must not be empty; None gives each stage one")
        if self.strategy not in get_args(Strategy):
            faults.append(
                f"strategy is not known, got {self.strategy!r}: {known_names(self.strategy, get_args(Strategy))}"
            )
        if self.sharing not in get_args(Sharing):
            faults.append(f"sharing is not known, got {self.sharing!r}: {known_names(self.sharing, get_args(Sharing))}")
        if self.device_gb is not None and self.device_gb <= 0:
            faults.append(f"device_gb must be above 0, got {self.device_gb}")
        if self.threads < 0:
            faults.append(f"threads must be 0 or more, got {self.threads}")
        if faults:
            raise PlacementError(faults)

    @classmethod
    def auto(cls, *, threads: int = 0) -> Placement:
        """All stages share one bundle, which has a GPU where the cluster has one."""
        return cls(threads=threads, find_gpu=True)

    @classmethod
    def colocated(cls, *, cpus: float = 1.0, gpus: float = 0.0, threads: int = 0) -> Placement:
        """All stages share one bundle."""
        return cls(bundles=(Bundle(cpus, gpus),), threads=threads)

    @classmethod
    def spread(cls, *, strategy: Strategy = "SPREAD", threads: int = 0) -> Placement:
        """A bundle of one CPU for each stage."""
        return cls(bundles=None, strategy=strategy, threads=threads)

    @classmethod
    def fixed(
        cls,
        bundles: Sequence[Bundle],
        stages: Mapping[str, int | Sequence[int]],
        *,
        strategy: Strategy = "PACK",
        replicas: Mapping[str, int] | None = None,
        threads: int = 0,
    ) -> Placement:
        """Each stage in the bundle whose index `stages` gives."""
        return cls(
            bundles=tuple(bundles), stages=dict(stages), strategy=strategy, replicas=replicas or {}, threads=threads
        )

    def plan(self, demands: Sequence[Demand], *, cluster_gpus: float = 0.0) -> Plan:
        """Seats for every actor. Raises PlacementError, listing every unknown stage and bundle."""
        names = [d.stage for d in demands]
        faults = [
            f"placement names stage {s!r}, which the graph does not have; {known_names(s, names)}"
            for s in sorted({*self.stages, *self.replicas} - set(names))
        ]
        bundles = self.bundles or tuple(Bundle() for _ in demands)
        if self.find_gpu and cluster_gpus >= 1 and any(d.uses_device for d in demands):
            bundles = tuple(Bundle(b.cpus, 1.0) for b in bundles)
        chosen: dict[str, list[int]] = {}
        for position, demand in enumerate(demands):
            want = self.stages.get(demand.stage, position if self.bundles is None else 0)
            indices = [want] * demand.num_actors if isinstance(want, int) else list(want)
            if len(indices) != demand.num_actors:
                faults.append(
                    f"stage {demand.stage!r} has {demand.num_actors} actors, the placement names {len(indices)} "
                    "bundles for them: give one number for all, or one for each"
                )
            faults += [
                f"stage {demand.stage!r} is placed in bundle {i}; there are bundles 0 to {len(bundles) - 1}"
                for i in sorted(set(indices))
                if not 0 <= i < len(bundles)
            ]
            chosen[demand.stage] = indices
        if faults:
            raise PlacementError(faults)
        seats = _shares(bundles, demands, chosen)
        faults = [
            f"stage {d.stage!r} needs {d.num_devices} whole GPUs for each process (tensor_parallel_size), bundle "
            f"{seat.bundle} ({bundles[seat.bundle]}) leaves it {seat.gpus:g}: give it a bundle with more GPUs"
            for d in demands
            for seat in dict.fromkeys(seats[d.stage])
            if d.num_devices > 1 and bundles[seat.bundle].gpus and seat.gpus < d.num_devices
        ]
        if faults:
            raise PlacementError(faults)
        return Plan(bundles=bundles, strategy=self.strategy, seats=seats, threads=self.threads)


def _shares(
    bundles: Sequence[Bundle], demands: Sequence[Demand], chosen: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Seat, ...]]:
    """Equal shares of a bundle for all who sit in it, of its GPUs for those who use one."""
    sitting = [0] * len(bundles)
    using_gpu = [0] * len(bundles)
    for demand in demands:
        for index in chosen[demand.stage]:
            sitting[index] += 1
            using_gpu[index] += demand.num_devices if demand.uses_device else 0
    return {
        demand.stage: tuple(
            Seat(
                bundle=index,
                cpus=_floor(bundles[index].cpus / sitting[index]),
                gpus=demand.num_devices * _gpu_share(bundles[index].gpus, using_gpu[index])
                if demand.uses_device
                else 0.0,
            )
            for index in chosen[demand.stage]
        )
        for demand in demands
    }


def _gpu_share(gpus: float, users: int) -> float:
    """The largest share that Ray can give to each: whole GPUs, or an equal part of one that lies on no two.

    >>> _gpu_share(8, 3), _gpu_share(2, 3), _gpu_share(0.5, 2)
    (2.0, 0.5, 0.25)
    """
    if gpus >= users:
        return float(gpus // users)
    return _floor(min(gpus, 1.0) / math.ceil(users / max(gpus, 1.0)))


def _floor(share: float) -> float:
    """Down to Ray's resolution of 1/10,000, so that equal shares never sum to more than the bundle."""
    return math.floor(share * 10_000) / 10_000
