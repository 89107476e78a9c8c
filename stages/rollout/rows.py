"""Samples of a prompt as rows of `Rollouts`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rollstream.stages.rollout.engine import Sample
from rollstream.stages.schema import Prompted, Rollouts


def rollout_rows(
    prompt: pa.RecordBatch, sample_ids: Sequence[str], samples: Sequence[Sample], responses: Sequence[str]
) -> pa.RecordBatch:
    """One row a sample: the columns of `prompt` (one row) repeated, and those that `Rollouts` adds."""
    repeated = prompt.select(list(Prompted.columns)).take(pa.array(np.zeros(len(samples), np.int32)))
    added = {
        "sample_id": pa.array(sample_ids, pa.string()),
        "response": pa.array(responses, pa.string()),
        "response_ids": _lists([s.response_ids for s in samples]),
        "loss_mask": _lists([s.mask for s in samples]),
        "finish_reason": pa.array([s.finish_reason for s in samples], pa.string()),
        "rollout_logprobs": _lists([s.logprobs for s in samples]),
        "weight_version": _lists([s.versions for s in samples]),
    }
    columns = {**dict(zip(repeated.schema.names, repeated.columns, strict=True)), **added}
    return pa.RecordBatch.from_arrays([columns[n] for n in Rollouts.columns], names=list(Rollouts.columns))


def _lists(rows: Sequence[np.ndarray]) -> pa.ListArray:
    """A list column with the arrays of `rows`, without a Python object for each token."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))
