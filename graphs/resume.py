"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

from rollstream.graphs.checkpoint import (
    Checkpoints,
    Found,
    RunState,
    changed_layouts,
    changed_packages,
    check_same_run,
)
from rollstream.graphs.options import Resume
from rollstream.stages.errors import CheckpointError


def checkpoint_to_resume(checkpoints: Checkpoints, resume: Resume) -> Found | None:
    """The newest that is whole, or None for a fresh start. Raises CheckpointError where `resume` does not allow what
    there is."""
    found = checkpoints.latest()
    if resume == "never" and found is not None:
        raise CheckpointError(
            f"{found.folder} is there already: resume it (--resume, or resume='auto'), or give another folder (out=...)"
        )
    if resume == "must" and found is None:
        raise CheckpointError(f"nothing to resume in {checkpoints.root}: it has no complete checkpoint")
    return found


def compared(found: Found, now: RunState) -> list[str]:
    """What to tell of a checkpoint that the run described by `now` goes on from: torn ones that were passed over, other
    packages, other layouts. Raises CheckpointError where it is another run's."""
    check_same_run(found.state, now)
    return [*found.passed_over, *changed_packages(found.state, now), *changed_layouts(found.state, now)]
