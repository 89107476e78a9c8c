"""Recorded runs, and runs of a part of a graph: what is computed again, and what is not."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from toys import diary_of, toy_graph

from rollstream import Placement, Step, run
from rollstream.graphs.group_log import read_group_log
from rollstream.graphs.recording import about_of, read

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


@dataclass(frozen=True)
class Done:
    """A run that came to its end. Tests that change something in its folder copy it."""

    steps: list[Step]
    folder: Path

    def recording(self, stage: str) -> Path:
        return self.folder / f"recorded/{stage}.arrows"


def until_echo(folder: Path, **options) -> Done:
    """Rollouts only, recorded; nothing is trained."""
    graph = toy_graph(folder / "none")
    return Done(list(run(graph, out=folder / "made", until="echo", record=("echo",), **options)), folder / "made")


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Done:
    """The groups of two steps, recorded behind `echo`."""
    return until_echo(tmp_path_factory.mktemp("rollouts"), steps=2)


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Done:
    """A whole run of two steps, recorded behind all stages after the prompts; group 2 is filtered."""
    folder = tmp_path_factory.mktemp("live")
    graph = toy_graph(folder / "d", score={"filter_at": 2}, with_ref=True)
    record = ("echo", "score", "ref", "weigh")
    return Done(list(run(graph, steps=2, out=folder / "out", record=record)), folder / "out")


def test_rollouts_without_training_are_recorded_in_order_and_resumed(rollouts, tmp_path):
    file = rollouts.recording("echo")
    assert about_of(file) == {"graph": "toy-until-echo", "edge": "echo"}
    assert [head["order"] for head, _ in read(file)] == list(range(8))
    shutil.copytree(rollouts.folder.parent, tmp_path, dirs_exist_ok=True)  # its MLflow record too
    until_echo(tmp_path, steps=3, resume="must")
    assert [
        (head["order"], group["sample_id"].to_pylist()) for head, group in read(tmp_path / "made/recorded/echo.arrows")
    ] == [(order, [f"g{order}.0", f"g{order}.1"]) for order in range(12)]
    assert not list(rollouts.folder.parent.glob("none*"))
    assert not list(tmp_path.glob("none*"))
    assert not (tmp_path / "made/model").exists()


def test_a_script_for_the_whole_graph_reads_nan_where_a_stage_was_left_out(rollouts):
    for step in rollouts.steps:
        assert math.isnan(step.metrics["reward/mean"])
        assert "reward/mean" not in step.metrics


def test_a_replayed_run_trains_on_the_same_rows_in_order_without_the_stages_before(live, tmp_path):
    assert [row["order"] for row in diary_of(live.folder.parent / "d")] == [0, 1, 3, 4, 5, 6, 7, 8]
    fatal = toy_graph(tmp_path / "again", echo={"dies": True}, score={"loads": False})
    placement = Placement(replicas={"score": 2})
    steps = list(run(fatal, steps=2, out=tmp_path / "two", replay=(live.recording("score"),), placement=placement))
    assert [s.metrics["reward/mean"] for s in steps] == [s.metrics["reward/mean"] for s in live.steps] == [2.0, 6.5]
    assert [row["made_by"] for row in diary_of(tmp_path / "again")] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row["order"] for row in diary_of(tmp_path / "again")] == list(range(8))
    lines = list(read_group_log(tmp_path / "two/groups.jsonl"))
    assert [line["group_id"] for line in lines] == [f"g{order}" for order in (0, 1, 3, 4, 5, 6, 7, 8)]
    assert {leg["stage"] for line in lines for leg in line["trail"]} == {"score", "weigh"}


def test_recordings_of_both_inputs_train_without_any_other_stage(live, tmp_path):
    files = [str(live.recording(stage)) for stage in ("ref", "weigh")]
    graph = toy_graph(tmp_path / "again", with_ref=True, echo={"dies": True})
    list(run(graph, steps=2, out=tmp_path / "two", replay=files))
    again, before = diary_of(tmp_path / "again"), diary_of(live.folder.parent / "d")
    assert [row["order"] for row in again] == list(range(8))
    assert {frozenset(row["columns"]) for row in again} == {frozenset(before[0]["columns"])}


def test_of_a_recording_torn_in_its_last_record_the_whole_ones_are_replayed(rollouts, tmp_path):
    file = Path(shutil.copy(rollouts.recording("echo"), tmp_path))
    os.truncate(file, file.stat().st_size - 5)
    steps = list(run(toy_graph(tmp_path / "d", echo={"dies": True}), steps=None, out=tmp_path / "two", replay=(file,)))
    assert [s.metrics["step/groups"] for s in steps] == [4, 3]
    assert [row["order"] for row in diary_of(tmp_path / "d")] == list(range(7))
