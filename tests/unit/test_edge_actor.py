"""The edge that pulls its producers, run without Ray: a producer here is a list of what its stream brings."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rollstream.graphs.edge import Failure, Item
from rollstream.graphs.edge_actor import EdgeActor, Lease, UpstreamFailed, as_failure
from rollstream.stages.errors import PluginError, StageError


def head(order: int, group_id: str = "") -> Item:
    rest = {"parts": (), "nbytes": 1, "num_rows": 1, "metrics": {}, "version": 0}
    return Item(group_id=group_id or f"g{order}", order=order, **rest)


def producer(*objects: Any, then_wait: bool = False) -> Any:
    """Streams each object as an awaitable, an exception as one that raises; then ends, or gives no more for ever."""

    async def stream():
        for thing in objects:
            ref: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ref.set_exception(thing) if isinstance(thing, Exception) else ref.set_result(thing)
            yield ref
        if then_wait:
            await asyncio.get_running_loop().create_future()

    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=stream))
    return SimpleNamespace(produce=made)


def pulled(*producers: Any, max_groups: int = 8) -> Lease:
    """What a consumer is given once the edge has pulled its producers to their ends."""

    async def run() -> Lease:
        edge = EdgeActor("a -> b", ["b"], max_groups, 1000, 60.0, 0)
        await asyncio.wait_for(edge.pull("a", producers), 5)
        return await edge.lease("b", 8, timeout_s=0)

    return asyncio.run(run())


def test_groups_of_all_replicas_come_with_their_rows():
    lease = pulled(producer("rows 0", head(0)), producer("rows 1", head(1)))
    assert sorted((i.group_id, i.parts[0].result()) for i in lease.items) == [("g0", "rows 0"), ("g1", "rows 1")]
    assert (lease.drained, lease.ended, lease.failure) == (True, False, None)


@pytest.mark.parametrize("before", [("rows 0", head(0)), ("rows 0", head(0), "rows 1")])
def test_an_error_ends_the_edge_whether_rows_or_their_head_were_due(before):
    error = PluginError("reward", "sample g1.0", "ZeroDivisionError")
    lease = pulled(producer(*before, error))
    assert lease.failure == Failure(stage="reward", subject="sample g1.0", cause="ZeroDivisionError", plugin=True)
    assert lease.items == ()


def test_a_dead_producer_is_named():
    lease = pulled(producer(RayActorError()))
    assert lease.failure is not None
    assert lease.failure.stage == "a"
    assert "RayActorError" in lease.failure.cause


def test_the_first_error_of_one_replica_does_not_wait_for_the_others():
    lease = pulled(producer(then_wait=True), producer(StageError("a", "g0", "first")))
    assert lease.failure == Failure(stage="a", subject="g0", cause="first")


def test_a_fault_of_the_edge_itself_is_carried_on():
    lease = pulled(producer("rows", head(0), "rows", head(1, group_id="g0")))
    assert lease.failure is not None
    assert "are both called 'g0'" in lease.failure.cause


def test_a_failure_upstream_passes_through_as_it_was():
    first = Failure(stage="rollout", subject="g0", cause="the first")
    assert as_failure(UpstreamFailed(first), "reward") is first


def test_a_full_edge_is_not_pulled_until_a_group_is_acked():
    async def run() -> list[tuple[str, int]]:
        edge = EdgeActor("a -> b", ["b"], 1, 1000, 60.0, 0)
        pull = asyncio.ensure_future(edge.pull("a", [producer("r", head(0), "r", head(1))]))
        given: list[tuple[str, int]] = []
        for _ in range(2):
            (item,) = (await edge.lease("b", 8, timeout_s=5)).items
            given.append((item.group_id, (await edge.stats()).total_groups))
            await edge.ack("b", [item.group_id])
        await asyncio.wait_for(pull, 5)
        return given

    assert asyncio.run(run()) == [("g0", 1), ("g1", 2)]
