"""Recorded runs, and runs of a part of a graph: what is computed again, and what is not."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from toys import diary_of, toy_graph

from rollstream import Placement, run
from rollstream.graphs.group_log import read_group_log
from rollstream.graphs.recording import about_of, read

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def recorded(tmp_path: Path, **options) -> Path:
    """The groups of two steps, recorded behind `echo`; nothing is trained."""
    out = tmp_path / "made"
    options = {"until": "echo", "record": ("echo",), "steps": 2} | options
    list(run(toy_graph(tmp_path / "none"), out=out, **options))
    return out / "recorded/echo.arrows"


def test_rollouts_without_training_are_recorded_in_order_and_resumed(tmp_path):
    file = recorded(tmp_path)
    assert about_of(file) == {"graph": "toy-until-echo", "edge": "echo"}
    assert [head["order"] for head, _ in read(file)] == list(range(8))
    recorded(tmp_path, steps=3, resume="must")
    assert [(head["order"], group["sample_id"].to_pylist()) for head, group in read(file)] == [
        (order, [f"g{order}.0", f"g{order}.1"]) for order in range(12)
    ]
    assert not list(tmp_path.glob("none*"))
    assert not (tmp_path / "made/model").exists()


def test_a_script_for_the_whole_graph_reads_nan_where_a_stage_was_left_out(tmp_path):
    (step,) = run(toy_graph(tmp_path / "none"), out=tmp_path / "made", until="echo", steps=1)
    assert math.isnan(step.metrics["reward/mean"])
    assert "reward/mean" not in step.metrics


def test_a_replayed_run_trains_on_the_same_rows_in_order_without_the_stages_before(tmp_path):
    graph = toy_graph(tmp_path / "live", score={"filter_at": 2})
    first = list(run(graph, steps=2, out=tmp_path / "out", record=("echo", "score")))
    assert [row["order"] for row in diary_of(tmp_path / "live")] == [0, 1, 3, 4, 5, 6, 7, 8]
    fatal = toy_graph(tmp_path / "again", echo={"dies": True}, score={"loads": False})
    placement = Placement(replicas={"score": 2})
    file = tmp_path / "out/recorded/score.arrows"
    steps = list(run(fatal, steps=2, out=tmp_path / "two", replay=(file,), placement=placement))
    assert [s.metrics["reward/mean"] for s in steps] == [s.metrics["reward/mean"] for s in first] == [2.0, 6.5]
    assert [row["made_by"] for row in diary_of(tmp_path / "again")] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [row["order"] for row in diary_of(tmp_path / "again")] == list(range(8))
    lines = list(read_group_log(tmp_path / "two/groups.jsonl"))
    assert [line["group_id"] for line in lines] == [f"g{order}" for order in (0, 1, 3, 4, 5, 6, 7, 8)]
    assert {leg["stage"] for line in lines for leg in line["trail"]} == {"score", "weigh"}


def test_recordings_of_both_inputs_train_without_any_other_stage(tmp_path):
    out = tmp_path / "out"
    list(run(toy_graph(tmp_path / "live", with_ref=True), steps=2, out=out, record=("ref", "weigh")))
    files = [str(out / f"recorded/{stage}.arrows") for stage in ("ref", "weigh")]
    graph = toy_graph(tmp_path / "again", with_ref=True, echo={"dies": True})
    list(run(graph, steps=2, out=tmp_path / "two", replay=files))
    again, live = diary_of(tmp_path / "again"), diary_of(tmp_path / "live")
    assert [row["order"] for row in again] == list(range(8))
    assert {frozenset(row["columns"]) for row in again} == {frozenset(live[0]["columns"])}


def test_of_a_recording_torn_in_its_last_record_the_whole_ones_are_replayed(tmp_path):
    file = recorded(tmp_path)
    os.truncate(file, file.stat().st_size - 5)
    steps = list(run(toy_graph(tmp_path / "d", echo={"dies": True}), steps=None, out=tmp_path / "two", replay=(file,)))
    assert [s.metrics["step/groups"] for s in steps] == [4, 3]
    assert [row["order"] for row in diary_of(tmp_path / "d")] == list(range(7))
