"""The flow of groups in a whole graph in one process (small_world.py): begun, resumed, mended.

Any mixture of these is in test_flow_machine.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_world import LEASE_S, World

from rollstream.graphs import flow as flowing
from rollstream.graphs.edge_actor import EdgeActor
from rollstream.graphs.flow import RowsLost, open_groups
from rollstream.graphs.item import Left
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.stats import Whereabouts
from rollstream.stages.errors import StalledError


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Any]:
    """Makes a world of eight groups; two are trained in a step."""
    made: list[World] = []

    def make(**settings: Any) -> World:
        made.append(World(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def turned(world: World, turns: int = 8) -> World:
    for _ in range(turns):
        world.turn()
    return world


def held(world: World) -> dict[str, dict[int, str]]:
    return {producer: edge.actor._queue.held() for producer, edge in world.edges.items()}


def states(world: World, producer: str, consumer: str) -> dict[int, str]:
    return {w.order: w.consumers[consumer] for w in world.edges[producer].actor._queue.whereabouts()}


def step(world: World) -> list[int]:
    """The next step, as soon as its groups are there."""
    for _ in range(50):
        if world.begin_step():
            break
        world.turn()
    orders = [group.order for group in world.step]
    world.end_step()
    return orders


def test_all_groups_are_trained_in_order(world):
    made = world()
    made.finish()
    assert made.history == [("trained", order) for order in range(8)]


def test_groups_that_leave_are_told_once_and_others_take_their_places(world):
    made = world(filtered={1}, poison={2})
    made.finish()
    assert sorted(order for _, order in made.history) == list(range(8))
    assert {how: order for how, order in made.history if how != "trained"} == {"filtered": 1, "quarantined": 2}


def test_no_more_groups_are_begun_than_staleness_allows(world):
    made = turned(world(max_staleness=0), 20)
    assert sorted(held(made)["rollout"]) == [0, 1]
    assert step(made) == [0, 1]
    assert sorted(held(turned(made, 20))["rollout"]) == [2, 3]


def test_a_retired_group_is_in_no_edge_and_no_journal(world):
    made = turned(world())
    step(made)
    made.kill_trainer()
    assert all(order not in groups for groups in held(made).values() for order in (0, 1) if made.ledger.step_of(order))


# Resumed -------------------------------------------------------------------------------------------------------------


def test_a_resume_goes_on_with_what_the_journals_hold(world):
    made = turned(world())
    before = held(made)
    made.kill_trainer()
    assert held(made) == before
    assert states(made, "rollout", "score") == dict.fromkeys(before["rollout"], "waiting") | dict.fromkeys(
        before["score"], "done"
    )


def test_a_resume_makes_again_what_newer_weights_made(world):
    made = turned(world(max_staleness=0))
    made.save()
    step(made)
    turned(made)
    assert set(held(made)["rollout"]) == {2, 3}
    made.kill_trainer()
    assert [held(made)[edge] for edge in ("rollout", "score", "ref")] == [{}, {}, {}]
    assert set(states(made, "prompts", "rollout").values()) == {"waiting"}
    assert (step(made), step(made)) == ([0, 1], [2, 3])


def test_a_resume_makes_again_what_took_the_place_of_groups_that_it_does_not_know_to_have_left(world):
    """Group 2 was begun in the place of 1, for the first step; it would be too old for the second one."""
    made = world(max_staleness=0, filtered={1})
    while 2 not in held(made)["rollout"]:
        made.turn(), made.look()
    made.kill_trainer()
    assert set(held(made)["rollout"]) == {0}
    made.filtered = ()
    made.finish()
    assert made.history == [("trained", order) for order in range(8)]


def test_a_resume_drops_rows_whose_rollouts_are_gone(world, tmp_path):
    made = turned(world())
    assert held(made)["score"]
    for edge in made.edges.values():
        edge.die()
    shutil.rmtree(tmp_path / "journal" / "rollout")
    made.begin()
    assert [held(made)[edge] for edge in ("rollout", "score", "ref")] == [{}, {}, {}]
    made.finish()
    assert made.history == [("trained", order) for order in range(8)]


# Mended --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("producer", ["prompts", "rollout", "score", "ref"])
def test_an_edge_that_died_goes_on_with_all_that_it_had(world, producer):
    made = turned(world())
    before = held(made)
    made.kill_edge(made.edges[producer])
    assert held(made)[producer] == {}
    made.mend(made.edges[producer])
    assert held(made) == before
    made.finish()
    assert {order: birth for order, birth in before["rollout"].items() if order < 2} == {0: "0.0", 1: "1.1"}
    assert made.history == [("trained", order) for order in range(8)]


def test_groups_that_are_behind_an_edge_that_died_are_not_made_again(world):
    made = turned(world())
    edge = made.edges["rollout"]
    made.kill_edge(edge), made.mend(edge)
    assert {o for o, state in states(made, "rollout", "score").items() if state == "done"} == set(held(made)["score"])
    assert {o for o, state in states(made, "rollout", "ref").items() if state == "done"} == set(held(made)["ref"])


def test_what_never_came_into_an_edge_that_died_is_given_again(world):
    made = turned(world())
    edge = made.edges["score"]
    made.ask(lambda: edge.retire.remote([0]))  # stands for a group that its journal did not take
    made.kill_edge(edge), made.mend(edge)
    assert states(made, "rollout", "score")[0] == "waiting"


def test_rows_that_others_need_and_no_journal_has_need_the_last_checkpoint(world, tmp_path):
    made = turned(world())
    edge = made.edges["rollout"]
    made.kill_edge(edge)
    shutil.rmtree(tmp_path / "journal" / "rollout")
    with pytest.raises(RowsLost, match="its journal lacks 3 groups that are under way"):
        made.mend(edge)


def test_rows_of_closed_groups_are_missed_by_nobody(world):
    made = turned(world())
    made.edges["score"].deaf = True
    step(made)
    assert {0, 1} <= set(held(made)["score"])
    made.kill_edge(made.edges["rollout"]), made.mend(made.edges["rollout"])
    assert not {0, 1} & set(held(made)["rollout"])


def test_an_edge_that_died_admits_what_it_admitted(world):
    made = world(max_staleness=0)
    edge = made.edges["prompts"]
    made.flow.admit(0)
    made.kill_edge(edge), made.mend(edge)
    assert sorted(held(turned(made, 20))["rollout"]) == [0, 1]
    assert (step(made), step(made)) == ([0, 1], [2, 3])


def test_an_edge_that_died_opens_with_its_admission_set(world, monkeypatch):
    """A consumer's call may be waiting at its door: it would take all that there is."""
    made = world(max_staleness=0)
    limits: list[int | None] = []
    opens = EdgeActor.open

    async def watched(actor: EdgeActor) -> None:
        limits.append(actor._queue._cursors["rollout"].below)
        await opens(actor)

    monkeypatch.setattr(EdgeActor, "open", watched)
    made.kill_edge(made.edges["prompts"]), made.mend(made.edges["prompts"])
    assert limits == [2]


def test_an_edge_that_was_out_of_reach_hears_what_it_missed(world):
    made = turned(world())
    edge = made.edges["rollout"]
    edge.deaf = True
    made.to_mend.append(edge)
    step(made)
    assert {0, 1} <= set(held(made)["rollout"])
    made.mend(edge)
    assert not {0, 1} & set(held(made)["rollout"])


def test_a_new_edge_is_told_which_holders_count_no_more(world):
    """A process may still be at work for an edge that is gone: what it leased would be lost with its stream."""
    made = turned(world())
    old = made.hosts["score"][0].calls[0].holder
    for producer in ("score", "rollout"):
        made.kill_edge(made.edges[producer])
        made.mend(made.edges[producer])
    assert made.edges["rollout"].actor._queue.ended("score", old)


def test_a_replica_that_died_gives_back_what_it_had_and_is_pulled_anew(world):
    made = turned(world(), 3)
    host = made.hosts["rollout"][0]
    old = host.calls[0].holder
    assert made.flow.holder(old) == ("rollout", 0)
    made.kill_host(host), made.mend(host)
    assert made.flow.holder(old) is None
    assert made.flow.holder(host.calls[0].holder) == ("rollout", 0)
    assert "leased" not in states(made, "prompts", "rollout").values()


def test_a_process_that_was_ended_and_stays_is_not_waited_for_for_ever(world, monkeypatch):
    made = world()
    ticks = iter(range(0, 10**6, 100))
    monkeypatch.setattr(flowing, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _: None))
    monkeypatch.setattr(flowing.actors, "restart", lambda rank: None)
    with pytest.raises(StalledError, match="a process of score was ended and is there still, 300 s later"):
        made.flow.renew_replica("score", 0, "killed")


def test_a_hung_process_is_told_of_by_its_edge(world):
    made = world()
    while not made.hosts["rollout"][0].batch:
        made.turn()
    made.now += LEASE_S
    made.look()
    assert made.to_mend == [made.hosts["rollout"][0]]


def test_a_group_in_training_is_trained_though_it_is_said_to_have_left(world):
    """Its holder died, but after it had put the group out."""
    made = turned(world())
    assert made.begin_step()
    made.edges["rollout"].actor._queue.leave(
        Left(order=0, group_id="g0", kind="quarantined", stage="score", reason="died")
    )
    made.look()
    made.end_step()
    made.look()
    assert made.history == [("trained", 0), ("trained", 1)]
    assert made.edges["rollout"].actor._queue.stats().left == ()


# What is under way ---------------------------------------------------------------------------------------------------


def at(order: int, version: int = 0, **consumers: str) -> Whereabouts:
    return Whereabouts(order=order, group_id=f"g{order}", version=version, consumers=consumers)


@pytest.mark.parametrize(
    ("edges", "state"),
    [
        ({"prompts": [at(0, rollout="waiting")]}, "planned"),
        ({"prompts": [at(0, rollout="leased")]}, "dispatched"),
        ({"prompts": [at(0, rollout="done")], "rollout": [at(0, score="waiting")]}, "produced"),
        ({"rollout": [at(0, score="done")], "score": [at(0, update="waiting")]}, "produced"),
        ({"rollout": [at(0, score="done")], "score": [at(0, update="leased")]}, "leased"),
    ],
)
def test_a_group_is_as_far_as_the_last_edge_that_has_it(edges, state):
    (group,) = open_groups(edges, "prompts", "update", Ledger())
    assert (group.order, group.group_id, group.state) == (0, "g0", state)


def test_closed_groups_are_not_under_way_and_the_others_come_in_order():
    ledger = Ledger()
    ledger.commit([0])
    edges = {"prompts": [at(0), at(2), at(1)], "rollout": [at(1, version=3)]}
    assert [(g.order, g.version) for g in open_groups(edges, "prompts", "update", ledger)] == [(1, 3), (2, 0)]
