"""Engine and trainer on one GPU by turns: what is done, in order, written down where it happens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from toys import toy_graph

from rollstream import run
from rollstream.graphs import runner

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

LOAD = ["new process", "set up", "rest"]
TURNS = [*["generate"] * 4, "rest", "train"]


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of events, of runs whose plan says turns: the cluster has no GPU to choose them for."""
    plan = runner.plan_on_cluster
    by_turns = {"turns": True, "memory": "one GPU for all"}
    monkeypatch.setattr(runner, "plan_on_cluster", lambda *given: dataclasses.replace(plan(*given), **by_turns))
    return tmp_path / "events"


def graph_of(events: Path, *, echo: dict[str, Any] | None = None, **settings: Any) -> Any:
    echo = {"events": str(events)} | (echo or {})
    return toy_graph(events.parent / "d", echo=echo, events=str(events), **settings)


def lines(events: Path) -> list[str]:
    return events.read_text().splitlines()


def test_the_engine_rests_before_each_update_and_takes_new_weights_before_it_goes_on(events):
    list(run(graph_of(events), steps=3, out=events.parent / "out", save_every=1))
    step = [*TURNS, "save"]
    assert lines(events) == [*LOAD, "load 0", *step, "load 1", *step, "load 2", *step, "close"]


def test_an_engine_that_dies_while_the_other_trains_is_loaded_in_its_own_turn(events):
    list(run(graph_of(events, kills_engine_at=2), steps=3, out=events.parent / "out", save_every=3))
    killed = [*TURNS, "new process", "trained", "set up"]
    assert lines(events) == [*LOAD, "load 0", *TURNS, "load 1", *killed, "load 2", *TURNS, "save", "close"]


def test_prompts_that_end_leave_the_gpu_to_the_checkpoint(events):
    list(run(graph_of(events, count=4), steps=9, out=events.parent / "out", save_every=9))
    assert lines(events) == [*LOAD, "load 0", *TURNS, "close", "save"]
