"""Processes of a run that die, hang or raise, and what becomes of their groups."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from toys import diary_of, toy_graph

from rollstream import Bounds, Placement, run
from rollstream.graphs.checkpoint import Checkpoints
from rollstream.graphs.ledger import Ledger
from rollstream.stages.errors import StageError

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def trained(folder: Path) -> list[int]:
    """Orders in the diary of the update stage."""
    return [row["order"] for row in diary_of(folder / "d")]


def pids(title: str) -> list[int]:
    """Processes of living actors of a class."""
    from ray.util.state import list_actors

    here = ray.get_runtime_context().gcs_address
    alive = list_actors(here, filters=[("state", "=", "ALIVE"), ("class_name", "=", title)], detail=True)
    return [actor.pid for actor in alive]


def killing(steps: Iterator, title: str) -> list:
    """All steps; after the second, as many kills as there are processes of the class, a step between."""
    done = [next(steps), next(steps)]
    for number in range(len(pids(title))):
        alive = sorted(pids(title))
        with suppress(ProcessLookupError):  # it went down with another
            os.kill(alive[number % len(alive)], signal.SIGKILL)
        done.append(next(steps))
    return done + list(steps)


@pytest.mark.parametrize("title", ["EdgeActor", "WeightStore"])
def test_an_edge_or_the_weight_store_dies_and_nothing_is_lost(tmp_path, title):
    graph = toy_graph(tmp_path / "d", with_ref=True, echo={"sleep_s": 0.05}, max_staleness=1)
    steps = killing(run(graph, steps=10, out=tmp_path / "out"), title)
    assert [s.index for s in steps] == list(range(1, 11))
    assert trained(tmp_path) == list(range(40))


def test_stages_die_and_nothing_is_lost_or_trained_twice(tmp_path):
    """Those of the update stage too: its steps since the last checkpoint, which may still be on its way, come again."""
    steps = killing(run(toy_graph(tmp_path / "d"), steps=9, out=tmp_path / "out", save_every=1), "StageHost")
    indices = [s.index for s in steps]
    again = [i for i, (before, after) in enumerate(pairwise(indices), 1) if after != before + 1]
    assert len(again) <= 1, indices
    assert all(indices[i - 1] - 1 <= indices[i] <= indices[i - 1] for i in again), indices
    assert indices[-1] == 9
    last_life = trained(tmp_path)[-4 * (9 - indices[again[0] if again else 0] + 1) :]
    assert last_life == list(range(36))[-len(last_life) :]
    found = Checkpoints(tmp_path / "out/checkpoints").latest()
    assert found is not None
    closed = Ledger.from_json(found.state.ledger).closed
    assert (closed.frontier, closed.ahead) == (36, set())


def test_without_a_checkpoint_a_run_begins_again_where_its_update_stage_dies(tmp_path):
    steps = run(toy_graph(tmp_path / "d"), steps=3, out=tmp_path / "out")
    first = next(steps)
    update = (tmp_path / "d.pid").read_text()
    os.kill(int(update), signal.SIGKILL)
    assert [s.index for s in (first, *steps)] == [1, 1, 2, 3]
    assert trained(tmp_path) == [*range(4), *range(12)]


def test_a_group_that_takes_its_process_down_twice_is_set_aside(tmp_path):
    out = tmp_path / "out"
    steps = list(run(toy_graph(tmp_path / "d", score={"die_at": 5}), steps=3, out=out, save_every=3))
    assert trained(tmp_path) == [o for o in range(13) if o != 5]
    assert steps[-1].metrics["step/left_groups"] == 1
    told = json.loads((out / "quarantine/5.json").read_text())
    assert (told["group_id"], told["stage"]) == ("g5", "score")
    assert "score died 2 times while it had this group" in told["reason"]
    with pa.OSFile(str(out / "quarantine/5.arrow")) as file:
        assert pa.ipc.open_file(file).read_all().column("sample_id").to_pylist() == ["g5.0", "g5.1"]
    found = Checkpoints(out / "checkpoints").latest()
    assert found is not None
    assert Ledger.from_json(found.state.ledger).left[5].kind == "quarantined"


def test_a_filtered_group_makes_room_for_the_next(tmp_path):
    list(run(toy_graph(tmp_path / "d", with_ref=True, score={"filter_at": 2}), steps=2, out=tmp_path / "out"))
    assert trained(tmp_path) == [0, 1, 3, 4, 5, 6, 7, 8]


def test_a_stage_that_dies_whatever_it_gets_ends_the_run(tmp_path):
    graph = toy_graph(tmp_path / "d", echo={"dies": True})
    begun = time.monotonic()
    with pytest.raises(StageError, match=r"stage echo died 3 times without a finished step.*max_restarts=2"):
        list(run(graph, steps=3, out=tmp_path / "out", max_restarts=2, max_deaths=9))
    assert time.monotonic() - begun < 60


def test_a_process_that_hangs_is_replaced(tmp_path):
    stuck = {"stick_at": 3, "stick_once": str(tmp_path / "stuck")}
    graph = toy_graph(tmp_path / "d", score=stuck, bounds=Bounds(lease_s=4.0))
    list(run(graph, steps=2, out=tmp_path / "out"))
    assert trained(tmp_path) == list(range(8))


def test_whatever_a_stage_raises_ends_the_run_with_it(tmp_path):
    begun = time.monotonic()
    graph = toy_graph(tmp_path / "d", score={"fail_at": 1, "error": "SystemExit"})
    with pytest.raises(StageError, match="SystemExit: the toy divides by zero") as caught:
        list(run(graph, steps=3, out=tmp_path / "out"))
    assert (caught.value.stage, caught.value.subject) == ("score", "g1")
    assert time.monotonic() - begun < 60


def test_a_full_disk_fails_a_save_and_not_the_run(tmp_path, capfd):
    graph = toy_graph(tmp_path / "d", full_disk_at=2)
    options = {"out": tmp_path / "out", "save_every": 1, "keep_last": 1}
    steps = list(run(graph, steps=3, **options))
    assert [Path(s.checkpoint).name if s.checkpoint else "" for s in steps] == ["", "step_000001", "step_000003"]
    assert [s.metrics["checkpoint/failed"] for s in steps] == [0, 0, 1]  # known when the next step has trained
    assert "step 2 is not saved, the last checkpoint is of step 1" in capfd.readouterr().err
    assert [p.name for p in (tmp_path / "out/checkpoints").iterdir()] == ["step_000003"]


def test_a_replica_takes_over_from_one_that_dies(tmp_path):
    graph = toy_graph(tmp_path / "d", score={"die_at": 2})
    placement = Placement(replicas={"score": 2})
    list(run(graph, steps=2, out=tmp_path / "out", placement=placement))
    assert trained(tmp_path) == [0, 1, 3, 4, 5, 6, 7, 8]
