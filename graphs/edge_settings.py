"""What each edge of a run is made with."""

from __future__ import annotations

from pathlib import Path

import ray

from rollstream.graphs.edge_actor import EdgeSettings
from rollstream.graphs.graph import Graph
from rollstream.graphs.memory import edge_bytes
from rollstream.graphs.options import RunOptions
from rollstream.placement import Placement


def edge_settings(graph: Graph, placement: Placement, options: RunOptions, folder: Path) -> list[EdgeSettings]:
    """One for each edge, for the cluster that Ray is connected to. Raises PlacementError where its object store is too
    small for the bounds."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    max_bytes = edge_bytes(graph.bounds.max_bytes, len(graph.edges), nodes)
    return [
        EdgeSettings(
            name=spec.name,
            producer=spec.producer,
            consumers=spec.consumers,
            num_producers=placement.replicas.get(spec.producer, 1),
            max_groups=graph.bounds.max_groups,
            max_bytes=max_bytes,
            lease_s=graph.bounds.lease_s,
            needed=graph.update.groups_per_step,
            max_deaths=options.max_deaths,
            folder=folder,
            record={"graph": graph.name, "edge": spec.producer} if spec.producer in options.record else None,
        )
        for spec in graph.edges
    ]
