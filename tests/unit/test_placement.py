"""Seats for the actors of a graph, and whether a cluster can ever hold them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.placement import Bundle, Demand, Placement, Plan, check_cluster
from rollstream.placement.placement import Strategy
from rollstream.stages.errors import PlacementError

DEMANDS = [
    Demand(stage="prompts"),
    Demand(stage="rollout", uses_device=True),
    Demand(stage="reward"),
    Demand(stage="actor", num_actors=2, uses_device=True),
]


def bundles_of(plan: Plan) -> dict[str, list[int]]:
    return {stage: [seat.bundle for seat in seats] for stage, seats in plan.seats.items()}


def gpus_of(plan: Plan) -> dict[str, list[float]]:
    return {stage: [seat.gpus for seat in seats] for stage, seats in plan.seats.items()}


def test_auto_has_one_bundle_without_a_gpu_where_there_is_none():
    plan = Placement.auto().plan(DEMANDS)
    assert plan.bundles == (Bundle(1.0, 0.0),)
    assert bundles_of(plan) == {"prompts": [0], "rollout": [0], "reward": [0], "actor": [0, 0]}
    assert {seat.cpus for seats in plan.seats.values() for seat in seats} == {0.2}


def test_auto_shares_a_gpu_among_those_who_use_one():
    plan = Placement.auto().plan(DEMANDS, cluster_gpus=8)
    assert plan.bundles == (Bundle(1.0, 1.0),)
    assert gpus_of(plan) == {"prompts": [0], "rollout": [0.3333], "reward": [0], "actor": [0.3333, 0.3333]}


def test_auto_asks_for_no_gpu_that_no_stage_uses():
    assert Placement.auto().plan(DEMANDS[:1], cluster_gpus=8).bundles == (Bundle(1.0, 0.0),)


def test_colocated_shares_what_it_is_given():
    plan = Placement.colocated(cpus=10, gpus=1, threads=3).plan(DEMANDS)
    assert (plan.bundles, plan.threads) == ((Bundle(10, 1),), 3)
    assert plan.seats["prompts"][0].cpus == 2.0


def test_spread_gives_each_stage_a_bundle_which_its_ranks_share():
    plan = Placement.spread().plan(DEMANDS)
    assert (len(plan.bundles), plan.strategy) == (4, "SPREAD")
    assert bundles_of(plan) == {"prompts": [0], "rollout": [1], "reward": [2], "actor": [3, 3]}
    assert plan.seats["actor"][0].cpus == 0.5


def test_fixed_seats_each_stage_or_each_rank_where_told():
    placement = Placement.fixed([Bundle(2), Bundle(4, 1)], {"rollout": 1, "actor": [1, 0]}, strategy="STRICT_PACK")
    plan = placement.plan(DEMANDS)
    assert bundles_of(plan) == {"prompts": [0], "rollout": [1], "reward": [0], "actor": [1, 0]}
    assert gpus_of(plan) == {"prompts": [0], "rollout": [0.5], "reward": [0], "actor": [0.5, 0]}


def test_a_plan_prints_who_sits_where():
    plan = Placement.fixed([Bundle(2), Bundle(4, 1)], {"rollout": 1, "actor": [1, 0]}).plan(DEMANDS)
    assert str(plan) == (
        "placement (PACK)\n  bundle 0 (2 CPU): prompts, reward, actor[1]\n  bundle 1 (4 CPU + 1 GPU): rollout, actor[0]"
    )


@given(
    bundle=st.builds(Bundle, st.floats(0.1, 64), st.one_of(st.floats(0, 1), st.integers(2, 8))),
    actors=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=6),
)
def test_shares_never_sum_to_more_than_the_bundle(bundle, actors):
    demands = [Demand(stage=f"s{i}", num_actors=n, uses_device=gpu) for i, (n, gpu) in enumerate(actors)]
    seats = [s for seats in Placement(bundles=(bundle,)).plan(demands).seats.values() for s in seats]
    assert sum(round(s.cpus * 10_000) for s in seats) <= bundle.cpus * 10_000
    assert sum(round(s.gpus * 10_000) for s in seats) <= bundle.gpus * 10_000


@pytest.mark.parametrize(
    ("gpus", "users", "share"), [(8, 3, 2.0), (2, 2, 1.0), (2, 3, 0.5), (3, 4, 0.5), (1, 3, 0.3333), (0.5, 2, 0.25)]
)
def test_a_share_is_whole_gpus_or_lies_on_one(gpus, users, share):
    """Ray refuses 1.5 GPUs, and 0.6666 of two GPUs fits only twice."""
    plan = Placement.colocated(gpus=gpus).plan([Demand(stage="a", num_actors=users, uses_device=True)])
    assert gpus_of(plan) == {"a": [share] * users}


def test_every_unknown_stage_and_bundle_is_listed():
    placement = Placement.fixed([Bundle()], {"rolout": 0, "reward": 1, "actor": [0, -1]}, replicas={"ref": 2})
    with pytest.raises(PlacementError) as caught:
        placement.plan(DEMANDS)
    assert caught.value.faults == [
        "placement names stage 'ref', which the graph does not have; Known: actor, prompts, reward, rollout",
        "placement names stage 'rolout', which the graph does not have; did you mean 'rollout'? "
        "Known: actor, prompts, reward, rollout",
        "stage 'reward' is placed in bundle 1; there are bundles 0 to 0",
        "stage 'actor' is placed in bundle -1; there are bundles 0 to 0",
    ]


def test_ranks_need_one_bundle_for_all_or_one_each():
    with pytest.raises(PlacementError, match="stage 'actor' has 2 actors, the placement names 3 bundles"):
        Placement.fixed([Bundle()], {"actor": [0, 0, 0]}).plan(DEMANDS)


def test_every_bad_setting_is_listed():
    with pytest.raises(PlacementError) as caught:
        Placement(bundles=(), replicas={"reward": 0}, strategy="STRICT_PAK", threads=-1)  # type: ignore[arg-type]
    told = str(caught.value)
    for fault in ("4 faults", "replicas of 'reward' must be at least 1", "bundles must not be empty", "'STRICT_PACK'"):
        assert fault in told


@pytest.mark.parametrize(("cpus", "gpus"), [(-1, 0), (0, 0), (1, -0.5), (1, 1.5)])
def test_a_bundle_that_ray_would_refuse_is_refused(cpus, gpus):
    with pytest.raises(PlacementError, match="got"):
        Bundle(cpus, gpus)


def plan(*bundles: Bundle, strategy: Strategy = "PACK") -> Plan:
    return Plan(bundles=bundles, strategy=strategy, seats={}, threads=0)


def node(cpus: float, gpus: float = 0) -> dict[str, float]:
    return {"CPU": cpus, "memory": 1e9} | ({"GPU": gpus} if gpus else {})


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes"),
    [
        ([Bundle(2), Bundle(2)], "PACK", [node(4)]),
        ([Bundle(2), Bundle(2)], "SPREAD", [node(4)]),
        ([Bundle(2), Bundle(2)], "STRICT_PACK", [node(2), node(4)]),
        ([Bundle(2), Bundle(2)], "STRICT_SPREAD", [node(2), node(4)]),
        ([Bundle(3), Bundle(2), Bundle(2), Bundle(2)], "PACK", [node(4), node(5)]),
        ([Bundle(1, 1), Bundle(16)], "STRICT_SPREAD", [node(16, 1), node(4, 1)]),
        ([Bundle(0.5)] * 400, "PACK", [node(100), node(100)]),
        ([Bundle(0.1)] * 10, "PACK", [node(1)]),
    ],
)
def test_what_fits_is_let_through(bundles, strategy, nodes):
    check_cluster(plan(*bundles, strategy=strategy), nodes)


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes", "told"),
    [
        ([Bundle(8)], "PACK", [node(4), node(4)], "no node has room for a bundle of 8 CPU (the plan"),
        ([Bundle(1, 1)], "PACK", [node(4)], "no node has room for a bundle of 1 CPU + 1 GPU (the plan"),
        ([Bundle(3)] * 2, "STRICT_PACK", [node(4), node(4)], "no node has room for a bundle of 6 CPU (the plan"),
        ([Bundle(5)] * 3, "PACK", [node(8), node(8)], "the 3 bundles fit together in no way (the plan"),
        (
            [Bundle(1)] * 3,
            "STRICT_SPREAD",
            [node(8)] * 2,
            "fit together in no way, each on a node of its own (the plan",
        ),
        ([Bundle(1)], "PACK", [], "the cluster has no node."),
    ],
)
def test_what_can_never_fit_is_refused(bundles, strategy, nodes, told):
    with pytest.raises(PlacementError) as caught:
        check_cluster(plan(*bundles, strategy=strategy), nodes)
    assert told in str(caught.value)


def test_the_message_says_what_is_wanted_and_what_each_node_has():
    with pytest.raises(PlacementError) as caught:
        check_cluster(Placement.colocated(cpus=2, gpus=1).plan(DEMANDS), [node(4), node(2)])
    assert str(caught.value) == (
        "no node has room for a bundle of 2 CPU + 1 GPU (the plan asks for 1 bundles, 2 CPU + 1 GPU in all, PACK); "
        "the cluster has node 0: 4 CPU, 0 GPU; node 1: 2 CPU, 0 GPU. Ask for less, share bundles "
        "(Placement.colocated()), or add nodes.\n"
        "placement (PACK)\n"
        "  bundle 0 (2 CPU + 1 GPU): prompts, rollout, reward, actor[0], actor[1]"
    )
