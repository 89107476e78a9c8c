"""What a rollout stage's process does with groups when the call that it works for breaks off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from rollstream.graphs import rollout_loop
from rollstream.graphs.edge_actor import Lease
from rollstream.graphs.item import Item
from rollstream.graphs.rollout_loop import RolloutLoop, Turn
from rollstream.graphs.weights import Published
from rollstream.stages.errors import StalledError


class Stage:
    """Ends groups in the order in which they came; refuses one that it has."""

    name, groups_in_flight, updates_in_flight = "rollout", 3, False

    def __init__(self, continuous: bool):
        self.continuous, self.has = continuous, []

    def submit(self, group_id: str) -> None:
        assert group_id not in self.has, f"{group_id} is here already"
        if group_id == "gone":
            raise LookupError("its rows are gone")
        self.has.append(group_id)

    def take(self, timeout_s: float) -> pa.RecordBatch | None:
        if not self.has:
            return None
        return pa.RecordBatch.from_pydict({"group_id": [self.has.pop(0)], "weight_version": [[0]]})


def item(order: int, group_id: str) -> Item:
    return Item(group_id=group_id, order=order, version=0, birth="x", num_rows=1, parts=())


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`leases` are what the edge before gives next; `asked` who asked, and with what under way."""
    scene = SimpleNamespace(leases=[], asked=[])

    def lease(consumer: str, room: int, **how: Any) -> Lease:
        scene.asked.append((how["holder"], how["holding"]))
        return Lease(items=tuple(scene.leases.pop(0)) if scene.leases else ())

    at_once = SimpleNamespace(wait=lambda calls, timeout: (calls, []), get=lambda call, timeout: call)
    monkeypatch.setattr(rollout_loop, "ray", at_once)
    scene.inlet = SimpleNamespace(lease=SimpleNamespace(remote=lease))
    return scene


def loop_of(scene: Any, *, continuous: bool) -> RolloutLoop:
    stage: Any = Stage(continuous)
    fetch: Any = lambda item: item.group_id  # noqa: E731
    return RolloutLoop(stage, inlet=scene.inlet, store=None, fetch=fetch, turn=Turn())


def taken(loop: RolloutLoop) -> list[str]:
    found: list[str] = []
    while (done := loop.take()) is not None:
        found.append(done[0].group_id)
    return found


@pytest.mark.parametrize("continuous", [False, True])
def test_what_is_under_way_goes_to_the_next_call_and_is_not_begun_again(scene, continuous):
    loop = loop_of(scene, continuous=continuous)
    groups = [item(0, "g0"), item(1, "g1"), item(2, "g2")]
    # given again is what the edge behind does not have: all, or what is left when no other is under way
    scene.leases = [groups, groups if continuous else groups[:1]]
    loop.attach("a")
    loop.lease()
    loop.begin()
    assert loop.take()[0].group_id == "g0"  # on its way when the edge behind dies
    loop.attach("b")
    found: list[str] = []
    for _ in range(3):
        loop.lease()
        loop.begin()
        found += taken(loop)
    assert sorted(found) == ["g0", "g1", "g2"]
    assert {holder for holder, _ in scene.asked} == {"a", "b"}


def test_groups_behind_one_that_could_not_be_begun_are_taken_again(scene):
    loop = loop_of(scene, continuous=True)
    scene.leases = [[item(0, "g0"), item(1, "gone"), item(2, "g2")], [item(2, "g2")]]
    loop.attach("a")
    loop.lease()
    with pytest.raises(LookupError):
        loop.begin()
    loop.attach("b")
    loop.lease()
    loop.begin()
    assert taken(loop) == ["g0", "g2"]


def test_nothing_begins_while_the_stage_rests_and_weights_are_loaded_again_after(scene, monkeypatch):
    monkeypatch.setattr(rollout_loop, "TAKE_S", 0.0)
    loop = loop_of(scene, continuous=True)
    stage, turn, loads = loop._stage, loop._turn, []
    stage.rest = lambda: loads.append("rest")
    loop._store, loop._version = object(), -1
    monkeypatch.setattr(loop, "_look_for_weights", lambda: None)
    monkeypatch.setattr(loop, "_latest", lambda: Published(version=3, buckets=()))
    monkeypatch.setattr(rollout_loop, "get_all", lambda *_, **__: [])
    stage.load_weights = lambda version, tensors: loads.append(version)
    scene.leases = [[item(0, "g0")], [], [item(1, "g1")], []]
    loop.attach("a")
    loop.lease()
    loop.begin()
    assert taken(loop) == ["g0"]
    turn.end(stage, lambda: loop.is_at_work)
    for _ in range(2):
        loop.lease()
        loop.begin()
    assert (taken(loop), loop.busy) == ([], True)
    turn.begin()
    loop.begin()
    assert taken(loop) == ["g1"]
    assert loads == [3, "rest", 3]


def test_a_rest_waits_for_what_is_under_way(scene, monkeypatch):
    busy = [True, True, False]
    stage: Any = SimpleNamespace(name="rollout", rest=lambda: busy.append(True))
    Turn().end(stage, lambda: busy.pop(0))
    assert busy == [True]
    monkeypatch.setattr(rollout_loop, "CALL_S", 0.0)
    with pytest.raises(StalledError, match="rollout: groups were under way"):
        Turn().end(stage, lambda: True)


def test_a_stage_that_quits_begins_nothing_more_and_waits_for_nothing(scene):
    loop = loop_of(scene, continuous=True)
    closed = []
    stage: Any = SimpleNamespace(close=lambda: closed.append(loop.is_at_work))
    scene.leases = [[item(0, "g0")], [item(1, "g1")]]
    loop.attach("a")
    loop.lease()
    loop.begin()
    loop._turn.quit(stage)
    loop.lease()
    loop.begin()
    assert closed == [True]
    assert list(loop._flying) == ["g0"]


def test_an_old_answer_of_the_weight_store_does_not_hide_newer_weights(scene, monkeypatch):
    """It was asked for newer weights, and answered, before groups came that were admitted for the newest."""
    loop = loop_of(scene, continuous=True)
    loop._stage.updates_in_flight, loads = True, []
    old, new = (Published(version=version, buckets=()) for version in (5, 6))
    store: Any = SimpleNamespace(latest=SimpleNamespace(remote=lambda *_, **__: old))
    loop._store, loop._version = store, 4
    monkeypatch.setattr(loop, "_latest", lambda: new)
    monkeypatch.setattr(rollout_loop, "get", lambda call, *_, **__: call)
    monkeypatch.setattr(rollout_loop, "get_all", lambda *_, **__: [])
    loop._stage.load_weights = lambda version, tensors: loads.append(version)
    loop._flying["g0"] = SimpleNamespace(item=item(0, "g0"))  # pyright: ignore[reportArgumentType]
    scene.leases = [[item(1, "g1")]]
    loop.lease()
    loop.begin()
    assert loads == [6]
    assert loop._flying["g1"].item.version == 6


def test_weights_that_are_gone_when_they_are_read_are_followed_by_newer_ones(scene, monkeypatch):
    loop, reads = loop_of(scene, continuous=True), []
    shared: Any = {version: SimpleNamespace(version=version) for version in (5, 6)}
    asked: list[tuple[Any, ...]] = []
    store: Any = SimpleNamespace(latest=SimpleNamespace(remote=lambda *args, **_: asked.append(args)))
    loop._store = store
    monkeypatch.setattr(loop, "_latest", lambda: Published(version=5, shared=shared[5]))
    monkeypatch.setattr(rollout_loop, "ask", lambda call, *_, **__: call() or Published(version=6, shared=shared[6]))
    loop._stage.load_shared_weights = lambda weights: reads.append(weights.version) or weights.version == 6
    scene.leases = [[item(0, "g0")]]
    loop.attach("a")
    monkeypatch.setattr(loop, "_waiting", [item(0, "g0")])
    loop._newest = loop._latest()
    loop.begin()
    assert (reads, asked) == ([5, 6], [(5,)])
    assert loop._flying["g0"].item.version == 6
