"""How many bytes an edge may hold, against the object store that it holds them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollstream.stages.errors import PlacementError

DEFAULT_BYTES = 256 * 1024 * 1024
#: Share of a node's object store that the edges take unless told otherwise; weights and readers need the rest.
EDGES_SHARE = 0.5
#: Share that they may be told to take.
MAX_SHARE = 0.9


def edge_bytes(max_bytes: int | None, num_edges: int, nodes: Sequence[Mapping[str, float]]) -> int:
    """Bound of each of `num_edges` edges, all of which may sit on the node with the smallest store. `nodes` holds each
    live node's resources by Ray's names.

    Raises PlacementError where `max_bytes` asks for more than is there: Ray would spill to disk, slowly and silently.

    >>> edge_bytes(None, 4, [{"object_store_memory": 800.0}])
    100
    """
    store = min((n["object_store_memory"] for n in nodes if "object_store_memory" in n), default=0.0)
    if max_bytes is None:
        return max(int(min(DEFAULT_BYTES, EDGES_SHARE * store / num_edges)), 1) if store else DEFAULT_BYTES
    if store and max_bytes * num_edges > MAX_SHARE * store:
        raise PlacementError(
            f"Bounds.max_bytes={max_bytes:,} lets the {num_edges} edges hold {max_bytes * num_edges:,} bytes, but a "
            f"node's object store has {store:,.0f}: set at most {int(MAX_SHARE * store / num_edges):,}, leave it out, "
            "or start Ray with a larger --object-store-memory"
        )
    return max_bytes
