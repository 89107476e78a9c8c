"""A group's columns, wherever they are: by the references at hand, or by asking the edge that owns them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayActorError

from rollstream.graphs.item import Item, Part
from rollstream.stages.errors import ProcessDied, StalledError
from rollstream.stages.schema import join_columns

#: An edge that died has its groups back within a few seconds.
FETCH_S = 120.0
#: A reference whose owner died may give no answer at all.
REFERENCE_S = 30.0
#: One that was waited for, and others with it, answers in this time if it does at all.
AT_HAND_S = 1.0
AGAIN_S = 0.2


def fetch(item: Item, edges: Mapping[str, Any], *, timeout_s: float = FETCH_S) -> pa.RecordBatch:
    """All columns of a group. `edges` are the graph's, by the name of the stage before each.

    Raises StalledError where the owner of a part does not give it within `timeout_s`, and ProcessDied where that edge
    was ended for good: the run is over.
    """
    return join_columns([_part(item, part, edges, timeout_s) for part in item.parts])


def fetch_all(items: Sequence[Item], edges: Mapping[str, Any]) -> list[pa.RecordBatch]:
    """`fetch` of each of several groups. What is at hand is read in one call, and once where several need it: for small
    groups the calls are what takes time."""
    refs = list(dict.fromkeys(part.ref for item in items for part in item.parts if part.ref is not None))
    try:
        found = dict(zip(refs, ray.get(refs, timeout=REFERENCE_S) if refs else [], strict=True))
    except (ObjectLostError, GetTimeoutError, RayActorError):
        found = {}  # one by one: each is asked for again where it must be

    def columns(item: Item, part: Part) -> pa.RecordBatch:
        return found[part.ref][1] if part.ref in found else _part(item, part, edges, FETCH_S, AT_HAND_S)

    return [join_columns([columns(item, part) for part in item.parts]) for item in items]


def _part(
    item: Item, part: Part, edges: Mapping[str, Any], timeout_s: float, first_s: float = REFERENCE_S
) -> pa.RecordBatch:
    """`first_s` is for the reference at hand."""
    give_up = time.monotonic() + timeout_s
    found: Part | None = part if part.ref is not None else None
    while True:
        try:
            if found is None:
                found = ray.get(edges[part.edge].part.remote(item.order, item.birth), timeout=REFERENCE_S)
            if found is not None:
                return ray.get(found.ref, timeout=first_s if found is part else REFERENCE_S)[1]
        except ActorDiedError as error:
            why = f"the edge behind it has ended, with the columns of {item.group_id}: {error}"
            raise ProcessDied(part.edge, "", why) from None
        except (ObjectLostError, GetTimeoutError, RayActorError):
            found = None  # the edge died: its successor has the rows in a new object
        if time.monotonic() > give_up:
            raise StalledError(
                f"the columns of {item.group_id} from {part.edge}: its edge did not give them in {timeout_s:g} s"
            )
        time.sleep(AGAIN_S)
