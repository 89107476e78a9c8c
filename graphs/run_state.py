"""What a checkpoint says about its run apart from tensors, and whether another run may go on from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, cast

from rollstream.stages.errors import CheckpointError

#: Packages whose versions a checkpoint records.
PACKAGES = ("rollstream", "torch", "megatron-core", "ray")
#: Settings that change how fast a run goes and not what it computes. Of `path`, the data's fingerprint tells whether
#: it matters. Another `layout` adds in another order: the last digits differ.
MAY_CHANGE = frozenset(
    {"max_groups", "max_bytes", "lease_s", "timeout_s", "path"}
    | {"layout", "micro_batch_size", "max_tokens_per_micro_batch", "recompute", "offload"}
)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything about a run that is not a tensor. All of it goes into JSON and comes back equal."""

    step: int  # steps done
    version: int  # of the weights
    ledger: Mapping[str, Any]  # which prompts are trained; Ledger.to_json()
    data: str  # fingerprint of the source
    graph: str  # the drawing
    settings: Mapping[str, Any]  # of every stage, by its name: {"actor": {"lr": "1e-06"}}
    packages: Mapping[str, str]  # installed_packages() of the driver
    tracking_run: str | None = None


def installed_packages() -> dict[str, str]:
    """Versions of PACKAGES as they are installed here; those that are not installed are left out."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def changed_packages(saved: RunState, now: RunState) -> list[str]:
    """A sentence for each package of another version than the checkpoint's. They are to be told and not refused: a
    run may go on after an update, but its numbers may differ in the last digits.

    >>> common = dict(step=1, version=1, ledger={}, data="", graph="", settings={})
    >>> changed_packages(RunState(packages={"ray": "2.59.0"}, **common), RunState(packages={"ray": "2.60.0"}, **common))
    ['ray: the checkpoint was made with 2.59.0, this run has 2.60.0']
    """
    names = sorted({*saved.packages, *now.packages})
    versions = [(name, saved.packages.get(name), now.packages.get(name)) for name in names]
    return [
        f"{name}: the checkpoint was made with {before or 'none'}, this run has {after or 'none'}"
        for name, before, after in versions
        if before != after
    ]


def changed_layouts(saved: RunState, now: RunState) -> list[str]:
    """A sentence for each stage whose ranks are laid out otherwise than when the checkpoint was made; to be told."""
    both = [(stage, saved.settings[stage], now.settings[stage]) for stage in now.settings if stage in saved.settings]
    return [
        f"{stage}: the checkpoint was made with {before['layout']}, this run has {after['layout']}; it is the same "
        "state, and the numbers may differ in the last digits"
        for stage, before, after in both
        if "layout" in before and "layout" in after and before["layout"] != after["layout"]
    ]


def check_same_run(saved: RunState, now: RunState) -> None:
    """Raises CheckpointError listing everything that differs between a checkpoint and the run that is to go on from it:
    the data, the graph, and each setting that is not in MAY_CHANGE."""
    faults: list[str] = []
    if saved.data != now.data:
        faults.append(f"data: the checkpoint was made on {saved.data}, now it is {now.data}")
    if saved.graph != now.graph:
        faults.append("graph:\n" + _diff(saved.graph, now.graph))
    faults += _setting_faults(saved.settings, now.settings)
    if faults:
        raise CheckpointError(
            "this checkpoint is of another run:\n  - "
            + "\n  - ".join(faults)
            + "\nGo on with the old settings, or start afresh in another folder (out=...)."
        )


def _diff(saved: str, now: str) -> str:
    """The two drawings line by line: "-" only the checkpoint has, "+" only this run has."""
    lines = difflib.unified_diff(saved.splitlines(), now.splitlines(), "the checkpoint", "this run", lineterm="")
    return "\n".join(f"    {line}" for line in lines)


def _setting_faults(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for stage in (*now, *(s for s in saved if s not in now)):
        if stage not in saved:
            yield f"{stage}: the checkpoint has no such stage"
        elif stage not in now:
            yield f"{stage}: the checkpoint has this stage, it is not there now"
        else:
            before, after = (cast("Mapping[str, Any]", settings[stage]) for settings in (saved, now))
            names = (*after, *(n for n in before if n not in after))
            yield from (
                f"{stage}.{name}: {_change(name, before, after)}"
                for name in names
                if name not in MAY_CHANGE and before.get(name) != after.get(name)
            )


def _change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A setting that only one side has is one of another version of the code."""
    if name not in before:
        return f"it was not there when the checkpoint was made, now it is {after[name]!r}"
    if name not in after:
        return f"the checkpoint has {before[name]!r}, it is not there now"
    return f"the checkpoint has {before[name]!r}, now it is {after[name]!r}"
