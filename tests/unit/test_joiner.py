"""The update stage's inlet, without Ray: its edges answer each call at once, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rollstream.graphs import joiner as joining
from rollstream.graphs.edge_actor import Lease
from rollstream.graphs.item import Failure, Item, Left, Part
from rollstream.graphs.joiner import Joiner
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.orders import Orders
from rollstream.stages.errors import PluginError, ProcessDied


class Call:
    def __init__(self, answer: Any):
        self.answer = answer


class Edge:
    """Gives leases one after another, then leaves its calls open; an error is raised."""

    def __init__(self, *leases: Any):
        self.leases, self.asked, self.retired = list(leases), [], []
        self.wanted: list[int] = []
        self.lease = SimpleNamespace(remote=self._lease)
        self.retire = SimpleNamespace(remote=self.retired.extend)

    def _lease(self, consumer: str, at_most: int, **how: Any) -> Call:
        self.asked.append((consumer, at_most, how["holder"], how["keep"]))
        self.wanted.append(how["at_least"])
        return Call(self.leases.pop(0) if self.leases else None)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(calls: list[Call], num_returns: int, timeout: float) -> Any:
        return [call for call in calls if call.answer is not None][:num_returns], []

    def get(call: Call, *_: Any, **__: Any) -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    monkeypatch.setattr(joining, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(joining, "get", get)
    monkeypatch.setattr(joining, "AGAIN_S", 0)


def lease(*orders: int, version: int = 0, drained: bool = False, birth: str = "x") -> Lease:
    rest = {"parts": (Part(edge="a", nbytes=1),), "num_rows": 1, "num_tokens": 5, "birth": birth, "version": version}
    return Lease(items=tuple(Item(group_id=f"g{o}", order=o, **rest) for o in orders), drained=drained)


def polled(*edges: Edge, ledger: Ledger | None = None) -> Joiner:
    """A joiner that has taken all that its edges give."""
    made = Joiner("actor", edges, at_most=4, ledger=ledger or Ledger())
    for _ in range(sum(len(edge.leases) for edge in edges) + 1):
        made.poll(0)
    return made


def orders(made: Joiner, wanted: int = 8) -> list[int]:
    return [group.order for group in made.take(wanted)]


def test_a_group_is_ready_when_all_edges_have_brought_it():
    first, second = Edge(lease(0, 1)), Edge(lease(0))
    made = polled(first, second)
    assert orders(made) == [0]
    second.leases.append(lease(1))
    made._calls.clear()
    assert (made.poll(0), orders(made)) == (1, [1])


def test_one_call_is_open_on_each_edge_and_its_leases_are_kept():
    edge = Edge()
    polled(edge).poll(0)
    assert edge.asked == [("actor", 4, "run", True)]


def test_groups_come_in_the_order_of_their_prompts_whatever_is_complete_first():
    first, second = Edge(lease(0, 1, 2, 3)), Edge(lease(3, 1))
    made = polled(first, second)
    assert orders(made) == []
    second.leases += [lease(0), lease(2)]
    made._calls.clear()
    made.poll(0)
    assert orders(made) == [0, 1]
    made.poll(0)
    assert (orders(made, 1), orders(made)) == ([2], [3])


def test_no_time_is_spent_on_waiting_once_a_steps_groups_are_ready(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    wait = joining.ray.wait

    def noted(calls: list[Call], num_returns: int, timeout: float) -> Any:
        waits.append(timeout)
        return wait(calls, num_returns, timeout)

    monkeypatch.setattr(joining.ray, "wait", noted)
    made = Joiner("actor", [Edge(lease(0, 1, 2), lease(3))], at_most=4, ledger=Ledger())
    assert [made.poll(0.5) for _ in range(3)] == [3, 4, 4]
    assert waits == [0.5, 0.5, 0]


def test_a_joined_group_has_its_items_in_the_order_of_the_edges():
    (group,) = polled(Edge(lease(0, version=3)), Edge(lease(0, version=4))).take(1)
    assert [item.version for item in group.items] == [3, 4]
    assert (group.version, group.num_tokens) == (3, 5)


def test_columns_of_two_samplings_are_never_joined():
    with pytest.raises(AssertionError, match="g0: its columns are of 2 samplings"):
        polled(Edge(lease(0, birth="x")), Edge(lease(0, birth="y")))


def test_after_a_resume_it_waits_for_no_group_that_is_closed_and_has_it_retired():
    edge = Edge(lease(4, 2, 3, 1))
    made = polled(edge, ledger=Ledger(closed=Orders(2, {3})))
    assert (orders(made), edge.retired) == ([2, 4], [3, 1])


def test_a_group_that_comes_again_is_joined_once():
    """An edge that was started again gives all that it has."""
    first = Edge(lease(0, 1, 2), lease(0, 1, 2, drained=True))
    made = polled(first, Edge(lease(0, 2), lease(0, 1, 2, drained=True)))
    assert (orders(made), made.ended) == ([0, 1, 2], True)


def test_an_edge_that_is_away_is_asked_again():
    edge = Edge(ActorUnavailableError("away", None), lease(0))
    assert orders(polled(edge)) == [0]


def left(order: int) -> Left:
    return Left(order=order, group_id=f"g{order}", kind="quarantined", stage="ref", reason="died")


@pytest.mark.parametrize("second", [lease(1, 2), lease(0, 1, 2)])
def test_a_group_that_leaves_holds_up_no_other(second):
    """Whether it came on all edges or not."""
    ledger = Ledger()
    made = Joiner("actor", [Edge(lease(0, 1, 2)), Edge(second)], at_most=4, ledger=ledger)
    made.poll(0)
    ledger.leave(left(0))
    made.poll(0)
    assert orders(made) == [1, 2]


def test_it_keeps_what_is_ready_or_being_trained_until_that_is_committed():
    ledger = Ledger()
    made = Joiner("actor", [Edge(lease(0, 1, 3))], at_most=4, ledger=ledger)
    made.poll(0)
    assert orders(made, 1) == [0]
    assert [made.keeps(order) for order in range(4)] == [True, True, False, False]
    ledger.commit([0])
    assert not made.keeps(0)


def test_it_has_ended_when_all_edges_are_drained_and_nothing_waits():
    assert not polled(Edge(lease(0, drained=True)), Edge(lease(0))).ended
    assert not polled(Edge(lease(0, 1, drained=True)), Edge(lease(0, drained=True))).ended
    made = polled(Edge(lease(0, drained=True)), Edge(lease(0, drained=True)))
    assert made.ended
    assert orders(made) == [0]


def test_a_group_that_one_edge_never_brings_is_waited_for_until_it_is_known_to_have_left():
    ledger = Ledger()
    made = polled(Edge(lease(0, 1, drained=True)), Edge(lease(0, drained=True)), ledger=ledger)
    assert not made.ended
    ledger.leave(left(1))
    assert made.ended


def test_a_failed_edge_raises_the_first_error_as_what_it_was():
    failure = Failure(stage="reward", subject="sample g0.1", cause="ZeroDivisionError", plugin=True)
    with pytest.raises(PluginError, match=r"stage 'reward' failed on sample g0.1:\nZeroDivisionError"):
        polled(Edge(Lease(ended=True, failure=failure)))


def test_an_edge_is_asked_for_what_the_step_still_lacks():
    edge = Edge(lease(0, 1, 2))
    made = Joiner("actor", [edge], at_most=4, ledger=Ledger())
    made.poll(0)
    made.ask()
    made.ask()  # one call is open already
    assert edge.wanted == [4, 1]


@pytest.mark.parametrize("error", [ActorDiedError(), RayTaskError("lease", "", ValueError("x"))])
def test_an_edge_that_does_not_come_back_is_told_of_in_our_own_terms(monkeypatch, error):
    def ray_get(call: Call, *_: Any, **__: Any) -> Any:
        raise call.answer

    def get(call: Call, what: str, **_: Any) -> Any:
        raise ProcessDied("the edge", "", what)

    monkeypatch.setattr(joining, "ray", SimpleNamespace(wait=joining.ray.wait, get=ray_get))
    monkeypatch.setattr(joining, "get", get)
    with pytest.raises(ProcessDied, match="an edge before"):
        polled(Edge(error))
