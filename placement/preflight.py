"""Whether a plan can ever be placed on the cluster as it is: asked before Ray, which would wait for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollstream.placement.placement import Bundle, Plan
from rollstream.stages.errors import PlacementError

#: What is searched for a way of laying bundles over nodes; past it the plan is left to Ray, whose wait has a deadline.
MAX_TRIES = 10_000
MAX_BUNDLES = 500

#: Free (CPU, GPU) of a node.
Free = tuple[float, float]


def check_cluster(plan: Plan, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises PlacementError, saying what is wanted and what each node has, if no way of laying the bundles fits.

    `nodes` holds each live node's total resources, by Ray's names ("CPU", "GPU").
    """
    if plan.strategy == "STRICT_PACK":
        wanted = [_total(plan)]
    else:
        wanted = sorted(plan.bundles, key=lambda b: (b.gpus, b.cpus), reverse=True)
    free = [(float(n.get("CPU", 0)), float(n.get("GPU", 0))) for n in nodes]
    for bundle in wanted:
        if not any(_fits(bundle, node) for node in free):
            raise PlacementError(_explain(f"no node has room for a bundle of {bundle}", plan, nodes))
    alone = plan.strategy == "STRICT_SPREAD"
    if len(wanted) <= MAX_BUNDLES and not _laid(wanted, free, alone=alone, tries=iter(range(MAX_TRIES))):
        own = ", each on a node of its own" if alone else ""
        raise PlacementError(_explain(f"the {len(wanted)} bundles fit together in no way{own}", plan, nodes))


def _laid(wanted: Sequence[Bundle], free: Sequence[Free], *, alone: bool, tries: Iterator[int]) -> bool:
    """Whether all bundles can be laid on the nodes, `alone`: on a node each. True where the tries end before."""
    if not wanted or next(tries, None) is None:
        return True
    bundle = wanted[0]
    for node in sorted({f for f in free if _fits(bundle, f)}):  # tightest first; equal nodes are tried once
        left = list(free)
        left.remove(node)
        if not alone:
            left.append((node[0] - bundle.cpus, node[1] - bundle.gpus))
        if _laid(wanted[1:], left, alone=alone, tries=tries):
            return True
    return False


def _fits(bundle: Bundle, node: Free) -> bool:
    rounding = 1e-6  # ten bundles of 0.1 are one CPU
    return node[0] + rounding >= bundle.cpus and node[1] + rounding >= bundle.gpus


def _total(plan: Plan) -> Bundle:
    return Bundle(sum(b.cpus for b in plan.bundles), sum(b.gpus for b in plan.bundles))


def _explain(fault: str, plan: Plan, nodes: Sequence[Mapping[str, float]]) -> str:
    has = "; ".join(f"node {i}: {n.get('CPU', 0):g} CPU, {n.get('GPU', 0):g} GPU" for i, n in enumerate(nodes))
    return (
        f"{fault} (the plan asks for {len(plan.bundles)} bundles, {_total(plan)} in all, {plan.strategy}); "
        f"the cluster has {has or 'no node'}. Ask for less, share bundles (Placement.colocated()), or add nodes.\n"
        f"{plan}"
    )
