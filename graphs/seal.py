"""`state.json`: what makes a folder a checkpoint, and how a torn one is known.

    {"step": 10, "version": 10, ..., "files": {"__0_0.distcp": 1048576, ...}}

It holds the RunState and the size of every other file, and is written after all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rollstream.graphs.run_state import RunState
from rollstream.stages.errors import CheckpointError

STATE = "state.json"
_FIELDS = frozenset(f.name for f in dataclasses.fields(RunState)) | {"files"}


def folder_name(step: int) -> str:
    """Name of the checkpoint of a step: `step_000010`."""
    return f"step_{step:06d}"


def seal(writing: Path, state: RunState) -> None:
    """Brings all that was written to disk and lists it in state.json, which comes last."""
    paths = sorted(writing.rglob("*"))
    files = {p.relative_to(writing).as_posix(): sync(p) for p in paths if p.is_file()}
    if not files:
        raise CheckpointError(
            f"the update stage wrote nothing that can be seen in {writing}: on several nodes, out=... must be on a "
            "file system that all of them share"
        )
    if STATE in files:
        raise CheckpointError(f"the update stage wrote a file called {STATE}, which is the run's own: rename it")
    text = json.dumps(dataclasses.asdict(state) | {"files": files}, indent=1)
    with open(writing / STATE, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for folder in (*(p for p in paths if p.is_dir()), writing):
        sync(folder)
    if wrong := faults(writing):
        raise CheckpointError(f"{writing} changed while it was published: {some(wrong)}")


def faults(folder: Path) -> list[str]:
    """Why a checkpoint is not whole; empty where it is.

    A file counts as it was written if it is there with its size: nothing is read but state.json.
    """
    return examine(folder)[1]


def check_is_whole(folder: Path) -> None:
    """Raises CheckpointError, saying what to give instead, unless `folder` is a checkpoint with all its files."""
    wrong = faults(folder)
    if not (folder / STATE).exists():
        inside = [p.parent for p in (*folder.glob(f"*/{STATE}"), *folder.glob(f"*/*/{STATE}"))]
        found = sorted(p for p in inside if not p.name.startswith("."))
        hint = f"the newest in it is {found[-1]}" if found else "give one of a run's checkpoints/step_*"
        raise CheckpointError(f"{folder} is not a checkpoint, it has no {STATE}: {hint}")
    if wrong:
        raise CheckpointError(f"checkpoint {folder} is not whole: {some(wrong)}")


def examine(folder: Path) -> tuple[RunState | None, list[str]]:
    """The state as far as it can be read, and the faults."""
    try:
        raw: Any = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        return None, [f"{STATE} is missing"]
    except (OSError, ValueError) as error:
        return None, [f"{STATE} can't be read: {error}"]
    if not isinstance(raw, dict):
        return None, [f"{STATE} holds no JSON object"]
    fields = cast("dict[str, Any]", raw)
    if wrong := list(_field_faults(fields)):
        return None, wrong
    files: Mapping[str, int] = fields.pop("files")
    state = RunState(**fields)
    if folder.name.removeprefix(".").removesuffix(".writing") != folder_name(state.step):
        return state, [f"{STATE} is of step {state.step}"]
    return state, list(_file_faults(folder, files))


def _field_faults(fields: Mapping[str, Any]) -> Iterator[str]:
    if missing := _FIELDS - set(fields):
        yield f"{STATE} lacks {', '.join(sorted(missing))}"
    if unknown := set(fields) - _FIELDS:
        yield f"{STATE} has {', '.join(sorted(unknown))}, which this version does not know"
    for name, kind in (("step", int), ("files", dict)):
        if name in fields and not isinstance(fields[name], kind):
            yield f"{STATE}: {name} must be {kind.__name__}, it is {fields[name]!r}"


def _file_faults(folder: Path, files: Mapping[str, int]) -> Iterator[str]:
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} can't be read: {error}"
        else:
            if found != size:
                yield f"{name} has {found} bytes, {size} were written"


def some(wrong: Sequence[str], most: int = 3) -> str:
    """Faults in one line, the first of many.

    >>> some(["a is missing", "b is missing", "c is missing", "d is missing", "e is missing"])
    'a is missing; b is missing; c is missing; and 2 more'
    """
    return "; ".join(wrong[:most]) + (f"; and {len(wrong) - most} more" if len(wrong) > most else "")


def sync(path: Path) -> int:
    """Brings a file or a folder's list of names to disk; its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
