"""What a step commits, and how it becomes visible all at once.

out/checkpoints/.step_000010.writing/   actor_update/...   state.json last
                step_000010/            after one rename: complete, or not there
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.graphs.ledger import Ledger
from rollstream.stages.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything about a run that is not a tensor."""

    step: int  # steps done
    version: int  # of the weights
    frontier: int  # prompts trained without a gap
    ahead: tuple[int, ...]  # prompts trained beyond the frontier
    data: str  # fingerprint of the source
    graph: str  # the drawing
    settings: Mapping[str, Any]  # of every stage, as text values
    tracking_run: str | None = None

    def ledger(self) -> Ledger:
        return Ledger(self.frontier, set(self.ahead))


class Checkpoints:
    """The checkpoints of one run's folder; the newest `keep_last` stay."""

    def __init__(self, root: Path, *, keep_last: int = 2):
        self.root = root
        self.keep_last = keep_last

    def begin(self, step: int) -> Path:
        """An empty folder to write step `step` into; what a run that died left half written is removed."""
        for left in self.root.glob(".step_*.writing"):
            shutil.rmtree(left)
        folder = self.root / f".step_{step:06d}.writing"
        folder.mkdir(parents=True)
        return folder

    def publish(self, writing: Path, state: RunState) -> Path:
        """Makes a written folder the newest checkpoint, then drops the oldest."""
        with open(writing / "state.json", "w") as file:
            json.dump(dataclasses.asdict(state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        final = self.root / f"step_{state.step:06d}"
        if final.exists():
            shutil.rmtree(final)
        writing.rename(final)
        for old in self.complete()[: -self.keep_last]:
            shutil.rmtree(old)
        return final

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(p for p in self.root.glob("step_*") if (p / "state.json").is_file())

    def latest(self) -> tuple[Path, RunState] | None:
        """The newest complete checkpoint and its state."""
        for folder in reversed(self.complete()):
            try:
                raw = json.loads((folder / "state.json").read_text())
                return folder, RunState(**raw | {"ahead": tuple(raw["ahead"])})
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{folder}/state.json can't be read ({error}): remove that folder to resume from the one before"
                ) from error
        return None


def check_same_run(saved: RunState, now: RunState) -> None:
    """Raises CheckpointError listing every setting that differs between a checkpoint and the run that resumes it.

    Settings that only change how fast or how long a run goes may differ (`MAY_CHANGE`).
    """
    faults: list[str] = []
    if saved.data != now.data:
        faults.append(f"data: the checkpoint was made on {saved.data}, now it is {now.data}")
    if saved.graph != now.graph:
        faults.append(f"graph: the checkpoint has\n{saved.graph}\nnow it is\n{now.graph}")
    for stage, settings in now.settings.items():
        before = saved.settings.get(stage, {})
        faults += [
            f"{stage}.{name}: the checkpoint has {before.get(name)!r}, now it is {value!r}"
            for name, value in settings.items()
            if before.get(name) != value and name not in MAY_CHANGE
        ]
    if faults:
        raise CheckpointError(
            "this checkpoint is of another run:\n  - "
            + "\n  - ".join(faults)
            + "\nGo on with the old settings, or start afresh in another folder (out=...)."
        )


#: Of `path`, the data's fingerprint tells whether it matters.
MAY_CHANGE = frozenset({"max_groups", "max_bytes", "lease_s", "timeout_s", "micro_batch_size", "path"})
