"""Saves of one run, of which at most one is under way: the update stage trains on while its files are written.

    begin     step N is done: its run state is taken, the update stage copies its own and goes on
              .step_000010.writing/   its ranks write
    look      all ranks have written: sealed with the run state of step N, published by a rename
              or one could not: discarded and told, and the last checkpoint stays

Only the runner's thread publishes. A driver or a rank that dies under way leaves a folder that is no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rollstream.graphs.checkpoint import Checkpoints, RunState
from rollstream.graphs.wait import get, get_all
from rollstream.stages.errors import CheckpointError, ProcessDied, StageError

#: The files of all ranks are there by then, or the save has failed.
WRITE_S = 1800.0
#: Where a rank has failed, the death of another shows by then.
DEATH_S = 3.0


@dataclass(frozen=True)
class _Writing:
    folder: Path
    state: RunState
    calls: list[Any]  # one of each rank


def _death_among(calls: Sequence[Any]) -> ProcessDied | None:
    """A rank that dies makes the others raise, often before its own death is known."""
    if len(calls) < 2:
        return None
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=DEATH_S)
    for call in done:
        try:
            get(call, "the files of a checkpoint", timeout_s=DEATH_S)
        except ProcessDied as died:
            return died
        except (OSError, StageError, CheckpointError):
            continue
    return None


class Saver:
    """`saved_step` is that of the last checkpoint, `failures` are the saves in a row that failed since. `tell` is given
    sentences for people."""

    def __init__(self, checkpoints: Checkpoints, tell: Callable[[str], None]):
        self._checkpoints, self._tell = checkpoints, tell
        self._writing: _Writing | None = None
        self._published: str | None = None
        self.saved_step = self.failures = self._most_failures = 0

    def go_on_from(self, step: int) -> None:
        """The run is where the checkpoint of this step is; 0 for the beginning."""
        self.saved_step = step
        self.failures = self._most_failures = 0

    def begin(self, step: int, take_state: Callable[[], RunState], begin_save: Callable[[Path], list[Any]]) -> None:
        """Begins to save a step that is done. Waits for the save before; one that fails, as on a full disk, is told of.

        `begin_save` gets the folder to write, and gives the calls that end when it is written.
        """
        self.settle()
        folder: Path | None = None
        try:
            state = take_state()
            folder = self._checkpoints.begin(step)
            self._writing = _Writing(folder, state, begin_save(folder))
        except (OSError, StageError, CheckpointError) as error:
            self._fail(step, folder, error)

    def look(self) -> None:
        """Publishes what is written by now; does not wait."""
        if self._writing is not None:
            _, pending = ray.wait(self._writing.calls, num_returns=len(self._writing.calls), timeout=0)
            if not pending:
                self.settle()

    def settle(self) -> None:
        """Waits for the save under way and publishes it. Raises ProcessDied where a rank died."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            get_all(writing.calls, "the files of a checkpoint", timeout_s=WRITE_S)
            self._published = str(self._checkpoints.publish(writing.folder, writing.state))
        except (OSError, StageError, CheckpointError) as error:
            self._fail(writing.state.step, writing.folder, _death_among(writing.calls) or error)
        else:
            self.saved_step, self.failures = writing.state.step, 0
            self._tell(f"checkpoint: {self._published}")

    def take_published(self) -> str | None:
        """The newest checkpoint since this was last asked."""
        published, self._published = self._published, None
        return published

    def take_failures(self) -> int:
        """The most saves in a row that are known to have failed, at any moment since this was last asked."""
        most, self._most_failures = max(self._most_failures, self.failures), 0
        return most

    def _fail(self, step: int, folder: Path | None, error: Exception) -> None:
        if folder is not None:
            self._checkpoints.discard(folder)
        if isinstance(error, ProcessDied):
            raise error
        self.failures += 1
        self._most_failures = max(self._most_failures, self.failures)
        self._tell(f"step {step} is not saved, the last checkpoint is of step {self.saved_step}: {error}")
