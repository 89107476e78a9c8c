"""A save is written while the run goes on: what it publishes, when, and what becomes of one that fails. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.graphs import saver as saver_module
from rollstream.graphs.checkpoint import Checkpoints, RunState
from rollstream.graphs.saver import Saver
from rollstream.stages.errors import ProcessDied, StageError


class Rank:
    """A rank of the update stage: writes when the test says so. Stands for the open call of it, too."""

    def __init__(self) -> None:
        self.folder = Path()
        self.done = False
        self.error: Exception | None = None

    def begin(self, folder: Path) -> list[Rank]:
        self.folder, self.done = folder, False
        return [self]

    def write(self) -> None:
        if self.error:
            raise self.error
        self.folder.joinpath("weights").write_text("all of them")
        self.done = True


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    def wait(calls: list[Rank], **_: Any) -> tuple[list[Rank], list[Rank]]:
        return [c for c in calls if c.done], [c for c in calls if not c.done]

    def get_all(calls: list[Rank], *_: Any, **__: Any) -> None:
        for call in calls:
            call.write()

    monkeypatch.setattr(saver_module, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(saver_module, "get_all", get_all)
    monkeypatch.setattr(saver_module, "get", lambda call, *_, **__: call.write())
    return Rank()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def saver(tmp_path: Path, told: list[str]) -> Saver:
    return Saver(Checkpoints(tmp_path), told.append)


def state(step: int) -> Callable[[], RunState]:
    return lambda: RunState(step=step, version=step, ledger={}, data="", graph="", settings={}, packages={})


def saved(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_nothing_is_published_before_it_is_written(saver: Saver, rank: Rank, tmp_path: Path):
    saver.begin(1, state(1), rank.begin)
    saver.look()
    assert (saved(tmp_path), saver.saved_step, saver.take_published()) == ([".step_000001.writing"], 0, None)
    rank.write()
    saver.look()
    assert (saved(tmp_path), saver.saved_step) == (["step_000001"], 1)
    assert [saver.take_published(), saver.take_published()] == [str(tmp_path / "step_000001"), None]


def test_the_run_state_is_that_of_the_moment_when_the_save_began(saver: Saver, rank: Rank, tmp_path: Path):
    run = SimpleNamespace(version=3)
    saver.begin(1, lambda: RunState(**{**vars(state(1)()), "version": run.version}), rank.begin)
    run.version = 4
    saver.settle()
    found = Checkpoints(tmp_path).latest()
    assert found is not None
    assert found.state.version == 3


def test_the_next_save_waits_for_the_one_before(saver: Saver, rank: Rank, tmp_path: Path):
    saver.begin(1, state(1), rank.begin)
    saver.begin(2, state(2), rank.begin)
    assert saved(tmp_path) == [".step_000002.writing", "step_000001"]


@pytest.mark.parametrize("error", [OSError("no space"), StageError("actor", "checkpoint", "no space")])
def test_a_save_that_can_not_be_written_is_told_and_the_last_stays(
    saver: Saver, rank: Rank, told: list[str], tmp_path: Path, error: Exception
):
    saver.begin(1, state(1), rank.begin)
    saver.settle()
    saver.begin(2, state(2), rank.begin)
    rank.error = error
    saver.settle()
    assert (saved(tmp_path), saver.saved_step, saver.failures) == (["step_000001"], 1, 1)
    assert told[-1].startswith("step 2 is not saved, the last checkpoint is of step 1: ")
    assert "no space" in told[-1]
    rank.error = None
    saver.begin(3, state(3), rank.begin)
    saver.settle()
    assert (saver.saved_step, saver.failures) == (3, 0)
    assert [saver.take_failures(), saver.take_failures()] == [1, 0]  # told, though a later save has worked


def test_a_save_that_can_not_begin_is_told(saver: Saver, told: list[str], tmp_path: Path):
    def refuse(folder: Path) -> list[Rank]:
        raise StageError("actor", "checkpoint", "no memory for a copy")

    saver.begin(1, state(1), refuse)
    saver.settle()
    assert (saved(tmp_path), saver.failures, len(told)) == ([], 1, 1)


def test_a_rank_that_dies_under_way_is_no_failed_save(saver: Saver, rank: Rank, told: list[str], tmp_path: Path):
    saver.begin(1, state(1), rank.begin)
    rank.error = ProcessDied("actor", "", "killed")
    with pytest.raises(ProcessDied):
        saver.settle()
    saver.settle()
    assert (saved(tmp_path), saver.failures, told) == ([], 0, [])


def test_the_death_of_a_rank_is_told_and_not_what_the_others_say_of_it(saver: Saver, rank: Rank, tmp_path: Path):
    other = Rank()
    saver.begin(1, state(1), lambda folder: rank.begin(folder) + other.begin(folder))
    rank.error = StageError("actor", "checkpoint", "connection closed by peer")
    other.error = ProcessDied("actor", "", "killed")
    rank.done = other.done = True
    with pytest.raises(ProcessDied):
        saver.settle()
    assert (saved(tmp_path), saver.failures, saver.take_failures()) == ([], 0, 0)
