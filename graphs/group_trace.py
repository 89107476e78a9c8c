"""One group's story, from the files of its run.

>>> print(trace_group(Path("runs/sums"), "r000031.e0"))                                      # doctest: +SKIP
group r000031.e0, order 7, in runs/sums

  begun 2026-03-01 12:00:03, 2.1 min ago
  stage    begun at          after       took
  prompts  12:00:03.120       0 ms      10 ms  =
  rollout  12:00:03.131      11 ms     4.20 s  =====================================
  reward   12:00:07.335     4.22 s     310 ms                                       ===
trained as step 2, on weights 0 versions newer than those that began it; 8 samples
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rollstream.graphs.item import Item, Leg
from rollstream.graphs.run_files import RunFiles
from rollstream.stages.errors import ConfigError

_BAR_CHARS = 40


def trace_group(folder: Path, group: str, *, now: float) -> str:
    """What became of a group, given by its id or its order. `now` is in seconds since the epoch.

    Raises ConfigError for a group that the run does not know, with the nearest ones.
    """
    files = RunFiles.read(folder)
    order, group_id = _found(files, group)
    name = f"group {group_id}, order {order}" if group_id else f"the group of order {order}"
    lines = [f"{name}, in {folder}", ""]
    closed = False
    for event in _events(files.log, order, group_id):
        lines += _told(files, event, now)
        closed = "back_to" not in event
    if not closed:
        lines += _not_in_log(files, order, now)
    return "\n".join(lines)


def _found(files: RunFiles, group: str) -> tuple[int, str]:
    """Order and id; the id is "" where only the ledger's counts know the group."""
    ids = files.ids()
    if (order := next((order for order, known in ids.items() if known == group), None)) is not None:
        return order, group
    if group.isdecimal():
        order = int(group)
        if order in ids or (files.saved is not None and order in files.saved.ledger.closed):
            return order, ids.get(order, "")
    near = difflib.get_close_matches(group, ids.values(), n=3, cutoff=0.5)
    raise ConfigError(
        f"{files.folder} knows no group {group!r}: "
        + (f"did you mean {', '.join(map(repr, near))}? " if near else "")
        + (f"Orders {min(ids)} to {max(ids)} are known" if ids else "It knows none yet")
    )


def _events(log: Iterable[Mapping[str, Any]], order: int, group_id: str) -> Iterator[Mapping[str, Any]]:
    """The lines about a group, "again" where it had been lost before, and a {"back_to": step} after each that was
    undone: the run went back to an earlier step. A run that begins anew shows it by its steps only."""
    newest = closed_in = 0  # the step of all groups; that in which this one was closed, if that stands
    was_lost = False
    for line in log:
        mine = line.get("order") == order and line["group_id"] == group_id
        step = line.get("resumed", line.get("step", newest))
        went_back = "resumed" in line or step < newest or (mine and closed_in > 0)
        back_to = max(step if "resumed" in line else step - 1, 0)
        newest = step
        if went_back and closed_in > back_to:
            yield {"back_to": back_to}
            closed_in, was_lost = 0, True
        if mine:
            yield {**line, "again": was_lost}
            closed_in = line.get("step", newest + 1)


def _told(files: RunFiles, event: Mapping[str, Any], now: float) -> Iterator[str]:
    if "back_to" in event:
        where = f"step {event['back_to']}" if event["back_to"] else "its beginning"
        yield f"lost with a process: the run went back to {where}"
    elif event["state"] == "trained":
        yield from _timeline([Leg(**leg) for leg in event["trail"]], now)
        again, behind = "again " * event["again"], event["staleness"]
        yield (
            f"trained {again}as step {event['step']}, on weights {behind} version{'s' * (behind != 1)} newer than "
            f"those that began it; {event['num_rows']} samples"
        )
    else:
        aside = files.aside.get(event["order"])
        yield from _timeline(Item.from_json(aside["item"]).trail if aside else (), now)
        yield f"{event['state']} at {event['stage']}: {event['reason']}"
        rows = files.folder / "quarantine" / f"{event['order']}.arrow"
        if aside and rows.exists():
            yield f"its rows: {rows}"


def _not_in_log(files: RunFiles, order: int, now: float) -> Iterator[str]:
    """What other files say of a group of which groups.jsonl has no last word."""
    held = {stage: groups[order] for stage, groups in files.under_way.items() if order in groups}
    saved = files.saved
    if held:
        legs = {leg.stage: leg for item in held.values() for leg in item.trail}
        yield from _timeline(list(legs.values()), now)
        yield f"under way: the journals of the edges behind {', '.join(held)} hold it"
    elif aside := files.aside.get(order):
        yield from _told(files, {**aside, "state": aside["kind"]}, now)
    if saved is None:
        return
    if left := saved.ledger.left.get(order):
        yield f"{left.kind} at {left.stage}: {left.reason} (as of checkpoint {saved.name})"
    elif (step := saved.ledger.step_of(order)) is not None:
        yield f"trained as step {step} (as of checkpoint {saved.name})"
    elif order in saved.open:
        yield f"{saved.open[order]['state']} (as of checkpoint {saved.name})"


def _timeline(trail: Sequence[Leg], now: float) -> Iterator[str]:
    """When each stage had the group: on the clock, since the first began, and as bars."""
    if not trail:
        return
    legs = sorted(trail, key=lambda leg: leg.begun)
    start, end = legs[0].begun, max(leg.begun + leg.seconds for leg in legs)
    a_char = max(end - start, 1e-9) / _BAR_CHARS
    width = max(len(name) for name in ("stage", *(leg.stage for leg in legs))) + 2
    yield f"  begun {datetime.fromtimestamp(start):%Y-%m-%d %H:%M:%S}, {_duration(now - start)} ago"
    yield f"  {'stage':<{width}}{'begun at':<12}{'after':>11}{'took':>11}"
    for leg in legs:
        clock = f"{datetime.fromtimestamp(leg.begun):%H:%M:%S.%f}"[:-3]
        left = min(int((leg.begun - start) / a_char), _BAR_CHARS - 1)
        bar = " " * left + "=" * max(round(leg.seconds / a_char), 1)
        times = f"{_duration(leg.begun - start):>11}{_duration(leg.seconds):>11}"
        yield f"  {leg.stage:<{width}}{clock}{times}  {bar}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(0.0123), _duration(4.2), _duration(126), _duration(7200), _duration(400_000)
    ('12 ms', '4.20 s', '2.1 min', '2.0 h', '4.6 days')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
