"""What a run's folder says of its groups, read without Ray and without touching anything: the run may go on.

groups.jsonl                 groups that are closed, and where the run went back to a checkpoint
checkpoints/step_*/          the ledger as of the newest checkpoint
journal/STAGE/log.jsonl      groups that are under way, by the edge that holds them
quarantine/ORDER.json        groups that took their process down too often
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.graphs.group_log import read_group_log
from rollstream.graphs.item import Item
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.seal import examine
from rollstream.stages.errors import ConfigError

_GROUPS, _JOURNALS = "groups.jsonl", "journal"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The newest whole checkpoint's word on its groups."""

    name: str  # of its folder
    ledger: Ledger
    open: dict[int, dict[str, Any]]  # order -> group_id, state, version


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """All of it, read at one moment."""

    folder: Path
    log: list[dict[str, Any]]
    saved: Saved | None
    under_way: dict[str, dict[int, Item]]  # stage -> what the edge behind it holds, by order
    aside: dict[int, dict[str, Any]]  # order -> why, with the group's head as "item"

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Raises ConfigError where the folder holds no run."""
        if not any((folder / name).exists() for name in (_GROUPS, _JOURNALS, "checkpoints")):
            raise ConfigError(f"{folder} holds no run: it has no {_GROUPS}, no {_JOURNALS} and no checkpoints")
        logs = sorted((folder / _JOURNALS).glob("*/log.jsonl"))
        return cls(
            folder=folder,
            log=list(read_group_log(folder / _GROUPS)),
            saved=_newest_checkpoint(folder / "checkpoints"),
            under_way={path.parent.name: _held(path) for path in logs},
            aside={int(p.stem): json.loads(p.read_text()) for p in (folder / "quarantine").glob("*.json")},
        )

    def ids(self) -> dict[int, str]:
        """The ids of all groups that are told of, by order; of a folder that several runs used, the last one's."""
        found = {line["order"]: line["group_id"] for line in self.log if "order" in line}
        found |= {order: aside["group_id"] for order, aside in self.aside.items()}
        if self.saved is not None:
            found |= {order: left.group_id for order, left in self.saved.ledger.left.items()}
            found |= {order: group["group_id"] for order, group in self.saved.open.items()}
        for held in self.under_way.values():
            found |= {order: item.group_id for order, item in held.items()}
        return found


def newest_run(root: Path) -> Path:
    """The folder in `root` whose run was the last to close a group. Raises ConfigError where there is none."""
    runs = sorted(root.glob(f"*/{_GROUPS}"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(f"there is no run in {root.absolute()}: say where it is (--out FOLDER)")
    return runs[-1].parent


def _newest_checkpoint(root: Path) -> Saved | None:
    """Folders that are not whole are passed over; they may be in the making."""
    for folder in sorted(root.glob("step_*"), reverse=True):
        state, wrong = examine(folder)
        if state is not None and not wrong:
            under_way = {group["order"]: group for group in state.ledger["open"]}
            return Saved(name=folder.name, ledger=Ledger.from_json(state.ledger), open=under_way)
    return None


def _held(path: Path) -> dict[int, Item]:
    """Heads of the groups that a journal's log has as live. Opening the journal itself would write to it."""
    held: dict[int, Item] = {}
    for entry in _whole_lines(path):
        if "put" in entry:
            held[entry["put"]] = Item.from_json(entry["head"])
        for order in entry.get("drop", ()):
            held.pop(order, None)
    return held


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The last line may be in the making."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
