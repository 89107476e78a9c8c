"""A group's columns, without Ray: a reference here is a list that holds what the edge put, or an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, ObjectLostError, OwnerDiedError

from rollstream.graphs import fetch as fetching
from rollstream.graphs.fetch import fetch, fetch_all
from rollstream.graphs.item import Item, Part
from rollstream.stages.errors import ProcessDied, StalledError

CALLS: list[Any] = []
#: For what gave no answer.
WAITS: list[float] = []
LOST = ObjectLostError("00", None, "")
OWNER_DIED = OwnerDiedError("00", None, "")
AWAY = ActorUnavailableError("away", None)


class Ref(list):
    """A list with an identity of its own, as references have."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def rows(**columns: Any) -> Ref:
    """A reference to rows of one part."""
    return Ref([(None, pa.RecordBatch.from_pydict({"sample_id": ["s0", "s1"], **columns}))])


TEXTS, REWARDS = {"text": ["x", "y"]}, {"reward": [1.0, 0.0]}
WHOLE = {"sample_id": ["s0", "s1"], **TEXTS, **REWARDS}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes with each look at the clock."""

    def get(ref: list[Any], timeout: float) -> Any:
        CALLS.append(ref)
        WAITS.extend([timeout] if not ref or isinstance(ref[0], Ref | Exception) else [])
        if not ref or isinstance(ref[0], Ref):
            return [get(one, timeout) for one in ref]
        if isinstance(ref[0], Exception):
            raise ref[0]
        return ref[0]

    ticks = iter(range(10**6))
    monkeypatch.setattr(fetching, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(fetching, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda seconds: None))


class Edge:
    """Gives its answers one after another, the last one for ever."""

    def __init__(self, *answers: Any):
        self.answers, self.asked = list(answers), []
        self.part = SimpleNamespace(remote=self._part)

    def _part(self, order: int, birth: str) -> list[Any]:
        self.asked.append((order, birth))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [Part(edge="e", nbytes=1, ref=answer) if isinstance(answer, list) else answer]


def item(text_ref: Any, reward_ref: Any) -> Item:
    parts = (Part(edge="rollout", nbytes=1, ref=text_ref), Part(edge="reward", nbytes=1, ref=reward_ref))
    return Item(group_id="g7", order=7, version=0, birth="5f", num_rows=2, parts=parts)


def test_references_at_hand_are_enough():
    assert fetch(item(rows(**TEXTS), rows(**REWARDS)), {}).to_pydict() == WHOLE


def test_a_part_without_a_reference_is_asked_for():
    edge = Edge(rows(**TEXTS))
    assert fetch(item(None, rows(**REWARDS)), {"rollout": edge}).to_pydict() == WHOLE
    assert edge.asked == [(7, "5f")]


@pytest.mark.parametrize("error", [LOST, OWNER_DIED, GetTimeoutError("no answer")])
def test_a_part_whose_owner_died_is_asked_for_and_no_other(error):
    edge = Edge(rows(**TEXTS))
    assert fetch(item([error], rows(**REWARDS)), {"rollout": edge}).to_pydict() == WHOLE


@pytest.mark.parametrize("first", [AWAY, LOST, None, Ref([LOST])])
def test_an_edge_that_is_being_started_again_is_asked_again(first):
    edge = Edge(first, first, rows(**TEXTS))
    assert fetch(item([OWNER_DIED], rows(**REWARDS)), {"rollout": edge}).to_pydict() == WHOLE
    assert len(edge.asked) == 3


def test_rows_that_do_not_come_are_named():
    with pytest.raises(StalledError, match="the columns of g7 from rollout: its edge did not give them in 5 s"):
        fetch(item(None, rows(**REWARDS)), {"rollout": Edge(None)}, timeout_s=5)


def test_an_edge_that_was_ended_is_not_waited_for():
    edge = Edge(ActorDiedError())
    with pytest.raises(ProcessDied, match="the edge behind it has ended, with the columns of g7"):
        fetch(item([OWNER_DIED], rows(**REWARDS)), {"rollout": edge})
    assert len(edge.asked) == 1


def test_what_several_groups_need_is_read_in_one_call():
    text, reward = rows(**TEXTS), rows(**REWARDS)
    CALLS.clear()
    found = fetch_all([item(text, reward), item(text, rows(reward=[2.0, 3.0]))], {})
    assert [group.to_pydict()["reward"] for group in found] == [[1.0, 0.0], [2.0, 3.0]]
    assert [len(CALLS[0]), CALLS[0][:2]] == [3, [text, reward]]
    assert CALLS[1:] == list(CALLS[0])  # which are the parts of that call


def test_of_several_groups_the_lost_ones_are_asked_for():
    edge = Edge(rows(**TEXTS))
    groups = [item(rows(**TEXTS), rows(**REWARDS)), item(Ref([LOST]), rows(**REWARDS))]
    assert [group.to_pydict() for group in fetch_all(groups, {"rollout": edge})] == [WHOLE, WHOLE]
    assert edge.asked == [(7, "5f")]


def test_a_reference_that_gives_no_answer_is_waited_for_once():
    dead, edge = Ref([GetTimeoutError("no answer")]), Edge(rows(**TEXTS))
    WAITS.clear()
    found = fetch_all([item(dead, rows(**REWARDS))], {"rollout": edge})
    assert found[0].to_pydict() == WHOLE
    assert sum(WAITS) < 2 * fetching.REFERENCE_S + 2
