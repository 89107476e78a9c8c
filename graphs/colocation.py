"""What the stages of a graph take of the GPUs that they share."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from rollstream.graphs.graph import Graph
from rollstream.placement import Placement, Plan, shared
from rollstream.stages.base import RolloutStage
from rollstream.stages.errors import PlacementError

ASK_S = 60.0
GB = 1e9


def with_sharing(graph: Graph, placement: Placement, plan: Plan, device_bytes: int | None) -> Plan:
    """The plan with what is on each GPU, and whether stages take turns; as it is where no GPU is in it, or nobody knows
    how large one is. Raises PlacementError where it can't be."""
    if not any(seat.gpus for seats in plan.seats.values() for seat in seats):
        return plan
    if device_bytes is None:
        return dataclasses.replace(
            plan, memory="  not estimated: no GPU said how large it is; device_gb=80 would say it"
        )
    found = {name: stage.memory(device_bytes) for name, stage in graph.stages.items()}
    for evaluation in graph.evaluations:
        (rollout,) = (stage for stage in evaluation.stages if isinstance(stage, RolloutStage))
        found[evaluation.name] = rollout.memory(device_bytes)
    turns = {graph.update.name: 1, graph.rollout.name: 0} if graph.rollout and graph.weights else {}
    return shared(
        plan,
        {name: memory for name, memory in found.items() if memory is not None},
        turns,
        device_bytes=device_bytes,
        wanted=placement.sharing,
        max_staleness=graph.weights.max_staleness if graph.weights else 0,
    )


def device_bytes(placement: Placement, plan: Plan) -> int | None:
    """Memory of one GPU, as the placement says, or as one of the cluster's does; None where there is none. Raises
    PlacementError where stages are to take turns and nobody knows."""
    if placement.device_gb is not None:
        return int(placement.device_gb * GB)
    if not any(seat.gpus for seats in plan.seats.values() for seat in seats):
        return None
    make: Any = ray.remote(num_cpus=0, num_gpus=0.01, max_retries=0)
    found: int | None = None
    with suppress(RayError):  # all are taken just now: then the plan has no estimate
        found = ray.get(make(_total_memory).remote(), timeout=ASK_S)
    if found is None and placement.sharing == "turns":
        raise PlacementError(
            f"sharing='turns' needs to know how large a GPU is, and the cluster did not say so in {ASK_S:g} s: give "
            "device_gb, such as Placement(sharing='turns', device_gb=80)"
        )
    return found


def _total_memory() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
