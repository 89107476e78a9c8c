"""A crash or an error at any moment of a save leaves the old checkpoint or the new one, and nothing else for long."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.graphs.checkpoint import Checkpoints, RunState


def save(checkpoints: Checkpoints, step: int, data: str) -> Path:
    """As a run does it: what fails is discarded, unless the process is gone."""
    writing = checkpoints.begin(step)
    try:
        (writing / "ranks").mkdir()
        (writing / "ranks" / ".metadata").write_text("of all")
        (writing / "weights").write_text(f"{data} {step}")
        fields = {"ledger": {}, "graph": "", "settings": {}, "packages": {}}
        return checkpoints.publish(writing, RunState(step=step, version=step, data=data, **fields))
    except OSError:
        checkpoints.discard(writing)
        raise


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing can catch a kill."""


class Moments:
    """Counts calls that change or sync the disk, and at call number `last` breaks them: all from there on, as a kill
    does, or this one only, as a disk that is full for a moment does."""

    CALLS = ("rename", "fsync", "open", "mkdir", "unlink", "rmdir")

    def __init__(self, patch: pytest.MonkeyPatch, last: int, error: type[BaseException]):
        self.count, self.last, self.error = 0, last, error
        for module, name in [*((os, name) for name in self.CALLS), (builtins, "open")]:
            patch.setattr(module, name, self.counted(getattr(module, name)))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.last or (self.count > self.last and self.error is Killed):
                raise self.error(errno.ENOSPC, "no space left on device")
            return None if call is FSYNC else call(*args, **kwargs)

        return counting


FSYNC = os.fsync


def moments(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], prepare: Callable[[], None], do: Callable[[], object]
) -> Iterator[int]:
    """Breaks `do` at its first call, at its second, and so on until it comes to its end; yields after each."""
    for last in range(1, 1000):
        prepare()
        with monkeypatch.context() as patch:
            breaking = Moments(patch, last, error)
            with contextlib.suppress(Killed, OSError):
                do()
        yield last
        if breaking.count < last:
            assert last > 10, "nothing was broken"
            return


def before(root: Path, kind: str) -> None:
    """A fresh folder with an old checkpoint: of step 1, with a torn step 2 beside it, or of step 2."""
    shutil.rmtree(root, ignore_errors=True)
    save(Checkpoints(root), 2 if kind == "replace" else 1, "old")
    if kind == "torn":
        (root / "step_000002").mkdir()


KINDS = pytest.mark.parametrize("kind", ["next", "torn", "replace"])


def save_new(root: Path) -> Path:
    return save(Checkpoints(root, keep_last=1), 2, "new")


def whole(root: Path) -> str:
    """Whether the newest is the old or the new one; its files must belong to it."""
    found = Checkpoints(root).latest()
    data = found.state.data
    assert (found.folder / "weights").read_text() == f"{data} {found.state.step}"
    return data


@KINDS
def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch, kind):
    root, seen = tmp_path / "c", []
    for _ in moments(monkeypatch, Killed, lambda: before(root, kind), lambda: save_new(root)):
        seen.append(whole(root))
    assert seen == sorted(seen, reverse=True)  # old until one moment, new from there on
    assert set(seen) == {"old", "new"}


@KINDS
def test_a_kill_at_any_moment_leaves_nothing_after_the_next_save(tmp_path, monkeypatch, kind):
    root = tmp_path / "c"
    for _ in moments(monkeypatch, Killed, lambda: before(root, kind), lambda: save_new(root)):
        save(Checkpoints(root, keep_last=1), 3, "newer")
        assert names(root) == ["step_000003"]


def test_a_second_kill_while_the_first_is_made_good_leaves_one_too(tmp_path, monkeypatch):
    root = tmp_path / "c"

    def cut_between_the_renames() -> None:
        before(root, "replace")
        os.rename(root / "step_000002", root / ".step_000002.replaced")
        (root / ".step_000002.writing").mkdir()

    seen = [whole(root) for _ in moments(monkeypatch, Killed, cut_between_the_renames, lambda: save_new(root))]
    assert set(seen) == {"old", "new"}


@KINDS
def test_an_error_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path, monkeypatch, kind):
    root = tmp_path / "c"
    for _ in moments(monkeypatch, OSError, lambda: before(root, kind), lambda: save_new(root)):
        assert whole(root) in ("old", "new")
        assert not any(name.endswith(".writing") for name in names(root))
        save(Checkpoints(root, keep_last=1), 3, "newer")
        assert names(root) == ["step_000003"]
