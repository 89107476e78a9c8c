"""Updates as a rank runs them, and what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import Metrics, World


def update(
    world: World, folder: Path, steps: list[list[pa.RecordBatch]], dp_rank_0_gets_all: bool = False, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Metrics of each step on this rank, and the weights at the end."""
    config = ActorUpdate.Config(model=str(folder), groups_per_step=4, **{"max_mismatch": None, "lr": 1e-3, **settings})
    stage = ActorUpdate(config)
    stage.has_ref = "ref_logprobs" in steps[0][0].schema.names
    stage.setup(world)
    share, dp = stage.share_of(world.rank), config.layout.dp
    metrics = [stage.update(([] if share else step) if dp_rank_0_gets_all else step[share::dp]) for step in steps]
    return metrics, dict(stage.weights())


def summed(ranks: list[Any]) -> dict[str, float]:
    """Means of the first step's metrics over all ranks."""
    metrics = Metrics()
    for step_metrics, _ in ranks:
        metrics.merge(step_metrics[0])
    return metrics.means()


def replaced(group: pa.RecordBatch, column: str, values: Any) -> pa.RecordBatch:
    index = group.schema.names.index(column)
    return group.set_column(index, group.schema.field(index), pa.array(values, group.column(column).type))


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert set(a) == set(b)
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)
