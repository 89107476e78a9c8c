"""Whether a plan can ever be placed on the cluster as it is: asked before Ray, which would wait for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollstream.placement.placement import Bundle, Plan
from rollstream.stages.errors import PlacementError


def check_cluster(plan: Plan, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises PlacementError, saying what is wanted and what each node has, if the bundles fit no node.

    `nodes` holds each live node's total resources, by Ray's names ("CPU", "GPU").
    """
    if plan.strategy == "STRICT_PACK":
        wanted = [Bundle(sum(b.cpus for b in plan.bundles), sum(b.gpus for b in plan.bundles))]
    else:
        wanted = sorted(plan.bundles, key=lambda b: (b.gpus, b.cpus), reverse=True)
    free = [{"CPU": float(n.get("CPU", 0)), "GPU": float(n.get("GPU", 0))} for n in nodes]
    for bundle in wanted:
        place = next((f for f in free if f["CPU"] >= bundle.cpus and f["GPU"] >= bundle.gpus), None)
        if place is None:
            raise PlacementError(_explain(plan, bundle, nodes))
        if plan.strategy == "STRICT_SPREAD":
            free.remove(place)
        else:
            place["CPU"] -= bundle.cpus
            place["GPU"] -= bundle.gpus


def _explain(plan: Plan, bundle: Bundle, nodes: Sequence[Mapping[str, float]]) -> str:
    has = "; ".join(f"node {i}: {n.get('CPU', 0):g} CPU, {n.get('GPU', 0):g} GPU" for i, n in enumerate(nodes))
    total = Bundle(sum(b.cpus for b in plan.bundles), sum(b.gpus for b in plan.bundles))
    return (
        f"no node has room for a bundle of {bundle} (the plan asks for {len(plan.bundles)} bundles, {total} in all, "
        f"{plan.strategy}); the cluster has {has or 'no node'}. Ask for less, share bundles "
        f"(Placement.colocated()), or add nodes.\n{plan}"
    )
