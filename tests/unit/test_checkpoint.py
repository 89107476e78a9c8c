"""Checkpoints become visible all at once, the newest stay, and a run resumes only what is its own."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollstream.graphs.checkpoint import Checkpoints, RunState, check_same_run
from rollstream.stages.errors import CheckpointError


def state(step: int = 1, **changes: Any) -> RunState:
    fields = {"version": step, "frontier": step * 4, "ahead": (), "data": "d", "graph": "a -> b"}
    return RunState(**({"step": step, "settings": {"actor": {"lr": "0.1"}}} | fields | changes))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep_last=2)


def save(checkpoints: Checkpoints, step: int, **changes: Any) -> Path:
    writing = checkpoints.begin(step)
    (writing / "weights").write_text(f"of step {step}")
    return checkpoints.publish(writing, state(step, **changes))


def test_what_was_saved_comes_back(checkpoints):
    folder = save(checkpoints, 3, ahead=(14, 17), tracking_run="r1")
    assert checkpoints.latest() == (folder, state(3, ahead=(14, 17), tracking_run="r1"))
    assert (folder / "weights").read_text() == "of step 3"
    assert checkpoints.latest()[1].ledger().ahead == {14, 17}


def test_there_is_none_in_a_folder_that_is_not_there(checkpoints):
    assert checkpoints.latest() is None


def test_the_newest_stay(checkpoints):
    for step in (9, 10, 100):
        save(checkpoints, step)
    assert [p.name for p in checkpoints.complete()] == ["step_000010", "step_000100"]
    assert sorted(p.name for p in checkpoints.root.iterdir()) == ["step_000010", "step_000100"]


def test_one_that_is_being_written_is_not_seen(checkpoints):
    old = save(checkpoints, 1)
    (checkpoints.begin(2) / "weights").write_text("half")
    assert checkpoints.complete() == [old]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_crash_before_the_rename_leaves_the_old_one(checkpoints, monkeypatch, call):
    checkpoints.keep_last = 1
    old = save(checkpoints, 1)

    def crash(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "rename")), crash)
    with pytest.raises(OSError, match="no space"):
        save(checkpoints, 2)
    assert checkpoints.latest() == (old, state(1))


def test_what_a_dead_run_left_half_written_goes(checkpoints):
    (checkpoints.begin(5) / "weights").write_text("half")
    again = checkpoints.begin(7)
    assert list(checkpoints.root.iterdir()) == [again]
    assert list(again.iterdir()) == []


def test_a_foreign_folder_is_left_alone(checkpoints):
    (checkpoints.root / "step_000000_mine").mkdir(parents=True)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert (checkpoints.root / "step_000000_mine").is_dir()


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_torn_state_is_refused_with_the_way_out(checkpoints, cut):
    save(checkpoints, 1)
    torn = save(checkpoints, 2) / "state.json"
    torn.write_text(torn.read_text()[:cut])
    with pytest.raises(CheckpointError, match=r"step_000002/state.json can't be read .*remove that folder"):
        checkpoints.latest()


@pytest.mark.parametrize("raw", ["[]", "3", '{"ahead": []}'])
def test_a_state_of_another_shape_is_refused(checkpoints, raw):
    (save(checkpoints, 1) / "state.json").write_text(raw)
    with pytest.raises(CheckpointError, match="can't be read"):
        checkpoints.latest()


def test_a_state_with_a_field_too_many_is_refused(checkpoints):
    text = json.dumps(dataclasses.asdict(state()) | {"mood": "good"})
    (save(checkpoints, 1) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="mood"):
        checkpoints.latest()


def test_a_resume_by_the_same_run_is_fine():
    check_same_run(state(3), state(0))


def test_a_resume_by_another_run_is_refused_with_every_difference():
    saved = state(settings={"actor": {"lr": "0.1", "clip": "0.2"}, "rollout": {"n": "8"}})
    now = state(data="e", graph="a -> c", settings={"actor": {"lr": "0.3", "clip": "0.2"}, "rollout": {"n": "4"}})
    with pytest.raises(CheckpointError) as caught:
        check_same_run(saved, now)
    assert str(caught.value) == (
        "this checkpoint is of another run:\n"
        "  - data: the checkpoint was made on d, now it is e\n"
        "  - graph: the checkpoint has\na -> b\nnow it is\na -> c\n"
        "  - actor.lr: the checkpoint has '0.1', now it is '0.3'\n"
        "  - rollout.n: the checkpoint has '8', now it is '4'\n"
        "Go on with the old settings, or start afresh in another folder (out=...)."
    )


def test_settings_that_change_nothing_of_the_result_may_differ():
    saved = state(settings={"reward": {"timeout_s": "1"}, "prompts": {"path": "/job1/train.jsonl"}})
    check_same_run(saved, state(settings={"reward": {"timeout_s": "9"}, "prompts": {"path": "/job2/train.jsonl"}}))
