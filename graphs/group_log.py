"""A line for each group that is closed, in OUT/groups.jsonl: when each stage had it, and how it ended.

    {"order": 7, "group_id": "r000031.e0", "state": "trained", "step": 2, "staleness": 0, "trail": [...]}
    {"resumed": 2}        steps after 2 were lost with a process, and their groups are trained again

It is a record for people, beside the ledger that decides.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.graphs.item import Left
from rollstream.graphs.joiner import Joined


class GroupLog:
    """Appends to the record of a run."""

    def __init__(self, path: Path):
        self._path = path

    def resumed(self, step: int) -> None:
        self._write([{"resumed": step}])

    def trained(self, step: int, groups: Sequence[Joined], staleness: Sequence[int]) -> None:
        """These groups were trained as `step`; `staleness` of each, in versions."""
        self._write(
            {
                "order": group.order,
                "group_id": group.group_id,
                "state": "trained",
                "step": step,
                "staleness": versions,
                "num_rows": group.items[0].num_rows,
                "trail": _trail(group),
            }
            for group, versions in zip(groups, staleness, strict=True)
        )

    def left(self, left: Left) -> None:
        """This group left the graph."""
        entry = dataclasses.asdict(left)
        self._write(
            [{"order": entry.pop("order"), "group_id": entry.pop("group_id"), "state": entry.pop("kind"), **entry}]
        )

    def _write(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """A record that can't be written, as on a full disk, is told of; it is no reason to end a run."""
        try:
            self._append(entries)
        except OSError as error:
            print(f"rollstream: not in {self._path}: {error}", file=sys.stderr)  # noqa: T201

    def _append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # cut short by a kill: the next line must not be lost with it
                    file.write(b"\n")
            file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())


def read_group_log(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines; a kill may have cut the last one short, and later ones follow it."""
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _trail(group: Joined) -> list[dict[str, Any]]:
    """The stages of all ways that the group came, by the time they began."""
    legs = {leg.stage: leg for item in group.items for leg in item.trail}
    return [dataclasses.asdict(leg) for leg in sorted(legs.values(), key=lambda leg: leg.begun)]
