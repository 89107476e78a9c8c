"""The checkpoints of a run's folder: each is there whole, or not at all.

    begin      .step_000010.writing/    what a crash left is removed, then the update stage writes its files here
    publish    .step_000010.writing/    every file is brought to disk; state.json, which lists them, comes last
               step_000010/             one rename
               .step_000005.removing/   only then do the oldest go
    discard    -                        where writing failed: the others are as they were

A folder of the same step is called `.step_000010.replaced` between two renames. A crash just then leaves no
`step_000010`; whoever looks next puts the old one back. No other name in the folder is ever touched.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollstream.graphs.run_state import (
    RunState,
    changed_layouts,
    changed_packages,
    check_same_run,
    installed_packages,
)
from rollstream.graphs.seal import examine, faults, folder_name, seal, some, sync
from rollstream.stages.errors import CheckpointError

__all__ = [
    "Checkpoints",
    "Found",
    "RunState",
    "changed_layouts",
    "changed_packages",
    "check_same_run",
    "faults",
    "installed_packages",
]

logger = logging.getLogger(__name__)

_PUBLISHED = re.compile(r"step_([0-9]{6,})")
_LEFT = re.compile(r"\.(step_[0-9]{6,})\.(writing|replaced|removing)")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoint to go on from."""

    folder: Path
    state: RunState
    passed_over: tuple[str, ...]  # a sentence for each newer one that is not whole


class Checkpoints:
    """The checkpoints in `root`. The newest `keep_last` stay, and for ever those of every `keep_every` steps.

    >>> checkpoints = Checkpoints(Path("runs/grpo/checkpoints"))                                 # doctest: +SKIP
    >>> writing = checkpoints.begin(10)                                                          # doctest: +SKIP
    >>> stage.save(writing)                                                                      # doctest: +SKIP
    >>> checkpoints.publish(writing, state)                                                      # doctest: +SKIP
    PosixPath('runs/grpo/checkpoints/step_000010')
    """

    def __init__(self, root: Path, *, keep_last: int = 2, keep_every: int | None = None):
        self.root = root
        self.keep_last, self.keep_every = keep_last, keep_every

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into. What a crash left is removed; raises OSError on a full disk."""
        self._put_back()
        for left, _ in self._left_behind():
            _remove(left)
        folder = self.root / f".{folder_name(step)}.writing"
        folder.mkdir(parents=True)
        return folder

    def publish(self, writing: Path, state: RunState) -> Path:
        """Makes a written folder the newest checkpoint, then drops the oldest.

        Raises OSError where the disk is full and CheckpointError where the folder does not hold what it should. Then
        the others are as they were, and the folder is to be discarded.
        """
        name = folder_name(state.step)
        assert writing.name == f".{name}.writing", f"{writing} is not for step {state.step}"
        seal(writing, state)
        final, aside = self.root / name, self.root / f".{name}.replaced"
        if final.exists():
            os.rename(final, aside)
        try:
            os.rename(writing, final)
        except OSError:
            self._put_back()
            raise
        sync(self.root)
        if aside.exists():
            _remove(aside)
        self._prune(state.step)
        return final

    def discard(self, writing: Path) -> None:
        """Removes a folder that could not be written to its end; one that is gone already is fine."""
        if writing.exists():
            _remove(writing)

    def complete(self) -> list[Path]:
        """All whole checkpoints, oldest first."""
        return [folder for _, folder in self._published() if not faults(folder)]

    def latest(self) -> Found | None:
        """The newest whole checkpoint, or None where there is no checkpoint at all.

        Raises CheckpointError where there are some and none is whole.
        """
        self._put_back()
        torn: list[str] = []
        for _, folder in reversed(self._published()):
            state, wrong = examine(folder)
            if state is not None and not wrong:
                return Found(folder=folder, state=state, passed_over=tuple(torn))
            torn.append(f"{folder.name} is not whole: {some(wrong)}")
        if torn:
            raise CheckpointError(
                f"no checkpoint in {self.root} can be resumed:\n  - "
                + "\n  - ".join(torn)
                + "\nPut back what is missing, or remove these folders and start afresh."
            )
        return None

    def _published(self) -> list[tuple[int, Path]]:
        """All checkpoints by step, whole or not."""
        found = [(m, p) for p in self._entries() if (m := _PUBLISHED.fullmatch(p.name))]
        steps = [(int(match[1]), path) for match, path in found if path.is_dir()]
        return sorted((step, path) for step, path in steps if path.name == folder_name(step))

    def _left_behind(self) -> Iterator[tuple[Path, str | None]]:
        """What a crash may have left; with each folder that was moved aside, the name that it had."""
        for path in self._entries():
            if match := _LEFT.fullmatch(path.name):
                yield path, match[1] if match[2] == "replaced" else None

    def _entries(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []

    def _put_back(self) -> None:
        """Undoes a replacement that was cut short between its two renames."""
        for aside, name in self._left_behind():
            if name is not None and not (self.root / name).exists():
                os.rename(aside, self.root / name)

    def _prune(self, newest: int) -> None:
        """Only whole ones count. What is newer than the one just published was passed over by a resume, and stays
        until its step is saved again."""
        older = [(step, folder) for step, folder in self._published() if step <= newest]
        stay = [step for step, folder in older if not faults(folder)][-self.keep_last :]
        for step, folder in older:
            if step != newest and step not in stay and (self.keep_every is None or step % self.keep_every):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Takes a folder out of sight, then removes it. What can't be removed is told and tried again by `begin`: it is no
    reason to end a run."""
    aside = folder
    try:
        if not folder.name.startswith("."):
            aside = folder.with_name(f".{folder.name}.removing")
            os.rename(folder, aside)
        if aside.is_symlink():
            aside.unlink()
        else:
            shutil.rmtree(aside)
    except OSError as error:
        logger.warning("%s is of no use any more and can't be removed: %s", aside, error)
