"""The update stage's inlet, fed with leases by hand."""

from __future__ import annotations

import pytest

from rollstream.graphs.edge import Failure, Item
from rollstream.graphs.edge_actor import Lease
from rollstream.graphs.joiner import Joiner
from rollstream.graphs.ledger import Ledger
from rollstream.stages.errors import PluginError


def lease(*orders: int, version: int = 0, drained: bool = False, nbytes: int = 1) -> Lease:
    rest = {"parts": (), "nbytes": nbytes, "num_rows": 1, "metrics": {}, "version": version}
    return Lease(items=tuple(Item(group_id=f"g{o}", order=o, **rest) for o in orders), drained=drained)


@pytest.fixture
def joiner() -> Joiner:
    return Joiner("actor", ["scored edge", "ref edge"], at_most=4, ledger=Ledger())


def test_a_group_is_complete_when_all_edges_have_brought_it(joiner):
    joiner._receive(0, lease(0, 1))
    assert joiner.take(4) == []
    joiner._receive(1, lease(0))
    assert [g.group_id for g in joiner.take(4)] == ["g0"]
    joiner._receive(1, lease(1))
    assert [g.group_id for g in joiner.take(4)] == ["g1"]


def test_groups_come_in_the_order_of_their_prompts_whatever_is_complete_first(joiner):
    joiner._receive(0, lease(0, 1, 2, 3))
    joiner._receive(1, lease(3, 1))
    assert joiner.take(4) == []
    joiner._receive(1, lease(0))
    assert [g.order for g in joiner.take(4)] == [0, 1]
    joiner._receive(1, lease(2))
    assert [g.order for g in joiner.take(1)] == [2]
    assert [g.order for g in joiner.take(4)] == [3]


def test_after_a_resume_it_waits_for_no_group_that_is_trained():
    joiner = Joiner("actor", ["edge"], at_most=4, ledger=Ledger(2, {3}))
    joiner._receive(0, lease(4, 2))
    assert [g.order for g in joiner.take(4)] == [2, 4]


def test_a_group_that_never_comes_is_not_passed_over_in_silence(joiner):
    joiner._receive(0, lease(1, drained=True))
    with pytest.raises(AssertionError, match="group 0 never came"):
        joiner._receive(1, lease(1, drained=True))


def test_a_joined_group_has_its_items_in_the_order_of_the_edges(joiner):
    joiner._receive(1, lease(0, version=4, nbytes=7))
    joiner._receive(0, lease(0, version=3, nbytes=5))
    (group,) = joiner.take(1)
    assert [i.version for i in group.items] == [3, 4]
    assert (group.version, group.nbytes) == (3, 7)


def test_it_has_ended_when_all_edges_are_drained(joiner):
    joiner._receive(0, lease(0, drained=True))
    assert not joiner.ended
    joiner._receive(1, lease(0, drained=True))
    assert joiner.ended
    assert len(joiner.take(4)) == 1


def test_a_group_that_one_edge_never_brings_is_not_lost_in_silence(joiner):
    joiner._receive(0, lease(0, 1, drained=True))
    with pytest.raises(AssertionError, match="g1"):
        joiner._receive(1, lease(0, drained=True))


def test_a_failed_edge_raises_the_first_error_as_what_it_was(joiner):
    failure = Failure(stage="reward", subject="sample g0.1", cause="ZeroDivisionError", plugin=True)
    with pytest.raises(PluginError, match=r"stage 'reward' failed on sample g0.1:\nZeroDivisionError"):
        joiner._receive(0, Lease(ended=True, failure=failure))
