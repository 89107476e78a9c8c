"""The edge that pulls its producers, run without Ray: a producer here is a list of what its stream brings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from edge_toys import ROWS, Inlet, head, journalled, producer, pull, run, until
from ray.exceptions import RayActorError

from rollstream.graphs.edge_actor import PeerDied, UpstreamFailed, as_failure
from rollstream.graphs.item import Failure
from rollstream.stages.errors import PluginError, StageError

# Producers -----------------------------------------------------------------------------------------------------------


def test_groups_of_all_replicas_come_and_the_edge_ends_with_the_last(edge):
    lease = pull(edge(num_producers=2), producer(head(0)), producer(head(1)))
    assert [(item.group_id, item.parts[0].ref.result()[1]) for item in lease.items] == [("g0", ROWS), ("g1", ROWS)]
    assert (lease.drained, lease.ended, lease.failure) == (True, False, None)


def test_the_edge_does_not_end_before_all_replicas_have(edge):
    assert not pull(edge(num_producers=2), producer(head(0))).drained


def test_a_producer_is_told_its_name_and_what_is_known(edge):
    asked: list[Any] = []
    made = edge()
    pull(made, producer(head(0), head(3)))
    pull(made, producer(asked=asked))
    assert asked == [("a/0", (1, frozenset({3})))]


def test_a_group_is_acked_once_it_is_in_the_journal(edge, tmp_path):
    inlet = Inlet()
    inlet.ack.remote = lambda stage, orders: inlet.told.append((stage, orders, list(journalled(tmp_path))))
    pull(edge(), producer(head(0), head(1)), inlet=inlet)
    assert inlet.told == [("a", [0], [0]), ("a", [1], [0, 1])]


def test_a_group_that_is_known_is_acked_and_dropped(edge):
    made, inlet = edge(), Inlet()
    lease = pull(made, producer(head(0), head(0, birth="another")), inlet=inlet)
    assert [item.birth for item in lease.items] == ["b0"]
    assert inlet.told == [("a", [0]), ("a", [0])]


def test_a_filtered_group_leaves_here_and_is_acked(edge):
    made, inlet = edge(), Inlet()
    item, _ = head(0, filtered="all rewards are equal")
    assert pull(made, producer((item, None)), inlet=inlet).ended
    (left,) = run(made, made.stats).left
    assert (left.order, left.kind, left.stage, left.reason) == (0, "filtered", "a", "all rewards are equal")
    assert inlet.told == [("a", [0])]


def test_an_error_ends_the_edge(edge):
    error = PluginError("reward", "sample g1.0", "ZeroDivisionError")
    lease = pull(edge(), producer(head(0), error))
    assert lease.failure == Failure(stage="reward", subject="sample g1.0", cause="ZeroDivisionError", plugin=True)
    assert (lease.items, lease.ended) == ((), True)


@pytest.mark.parametrize("error", [RayActorError(), PeerDied("rank 1")])
def test_a_replica_that_dies_ends_nothing_and_is_pulled_again(edge, error):
    made = edge()
    lease = pull(made, producer(head(0), error))
    assert ([i.order for i in lease.items], lease.drained, lease.failure) == ([0], False, None)
    lease = pull(made, producer(head(0), head(1)))
    assert ([i.order for i in lease.items], lease.drained) == ([1], True)


def test_the_end_of_a_stream_that_was_replaced_does_not_end_the_edge(edge):
    made = edge()

    async def do() -> bool:
        old = asyncio.ensure_future(made.pull(0, producer(), "old", None))
        new = asyncio.ensure_future(made.pull(0, producer(then_wait=True), "new", None))
        await old
        new.cancel()
        return made._queue.closed

    assert run(made, do) is False


def test_a_replica_that_is_pulled_again_has_not_ended(edge):
    made = edge(num_producers=2)

    async def do() -> bool:
        await made.pull(0, producer(), "old", None)
        again = asyncio.ensure_future(made.pull(0, producer(then_wait=True), "new", None))
        await asyncio.sleep(0)
        await made.pull(1, producer(), "a/1", None)
        again.cancel()
        return made._queue.closed

    assert run(made, do) is False


def test_the_first_error_of_one_replica_does_not_wait_for_the_others(edge):
    made = edge(num_producers=2)

    async def do() -> Any:
        other = asyncio.ensure_future(made.pull(0, producer(then_wait=True), "a/0", None))
        await made.pull(1, producer(StageError("a", "g0", "first")), "a/1", None)
        other.cancel()
        return (await made.lease("b", 8, holder="b/0")).failure

    assert run(made, do) == Failure(stage="a", subject="g0", cause="first")


def test_a_fault_of_the_edge_itself_is_carried_on(edge):
    lease = pull(edge(), producer(head(0), head(1, group_id="g0")))
    assert lease.failure is not None
    assert "are both called 'g0'" in lease.failure.cause


def test_a_failure_upstream_passes_through_as_it_was():
    first = Failure(stage="rollout", subject="g0", cause="the first")
    assert as_failure(UpstreamFailed(first), "reward") is first


# Room ----------------------------------------------------------------------------------------------------------------


def test_a_full_edge_is_not_pulled_until_a_group_is_retired(edge):
    made = edge(max_groups=1)

    async def do() -> list[Any]:
        pulling = asyncio.ensure_future(made.pull(0, producer(head(0), head(1)), "a/0", None))
        given: list[Any] = []
        for _ in range(2):
            (item,) = (await made.lease("b", 8, holder="b/0", timeout_s=5)).items
            await made.ack("b", [item.order])
            given.append((item.order, (await made.stats()).total_groups))
            await made.retire([item.order])
        await pulling
        return given

    assert run(made, do) == [(0, 1), (1, 2)]


def test_while_there_is_no_room_what_the_producer_holds_is_renewed(edge):
    made, inlet = edge(max_groups=1), Inlet()

    async def do() -> None:
        pulling = asyncio.ensure_future(made.pull(0, producer(head(0), head(1)), "a/0", inlet))
        await until(lambda: len(inlet.told) == 2)
        await made.retire([0])
        await until(lambda: len(inlet.told) >= 3)
        pulling.cancel()

    run(made, do)
    assert inlet.told[:3] == [("a", [0]), ("a", "a/0"), ("a", [1])]


# Consumers -----------------------------------------------------------------------------------------------------------


def test_a_lease_comes_back_with_fewer_than_it_wants_at_its_deadline_or_the_end(edge):
    made = edge(num_producers=2)

    async def do() -> list[Any]:
        await made.pull(0, producer(head(0), head(1)), "a/0", None)
        early = await made.lease("b", 4, holder="b/0", at_least=3, timeout_s=0)
        await made.release("b", "b/0", "")
        waiting = asyncio.ensure_future(made.lease("b", 4, holder="b/1", at_least=4, timeout_s=60))
        await asyncio.sleep(0)
        assert not waiting.done()
        await made.pull(1, producer(head(2)), "a/1", None)
        return [early, await waiting]

    assert [[item.order for item in lease.items] for lease in run(made, do)] == [[0, 1], [0, 1, 2]]


def test_a_lease_waits_for_the_first_group(edge):
    made = edge()

    async def do() -> list[int]:
        waiting = asyncio.ensure_future(made.lease("b", 8, holder="b/0", timeout_s=60))
        await asyncio.sleep(0)
        await made.pull(0, producer(head(0)), "a/0", None)
        return [item.order for item in (await waiting).items]

    assert run(made, do) == [0]


def test_rows_are_had_by_order_and_birth(edge):
    made = edge()
    pull(made, producer(head(0)))
    part = run(made, lambda: made.part(0, "b0"))
    assert (part.edge, part.ref.result()[1]) == ("a", ROWS)
    assert run(made, lambda: made.part(0, "another")) is None
    assert run(made, lambda: made.part(1, "b1")) is None
