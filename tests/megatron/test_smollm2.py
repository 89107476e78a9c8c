"""The demo's model, in full size: log-probabilities agree with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob

pytestmark = pytest.mark.megatron


def score(world: World, folder: Path, group: pa.RecordBatch) -> list[Any]:
    stage = RefLogprob(RefLogprob.Config(model=str(folder), tp=world.size))
    stage.setup(world)
    return stage.process(group)["ref_logprobs"].to_pylist()


@pytest.mark.parametrize("tp", [1, 3])
def test_agrees_with_transformers(
    launch: Any, smollm2: Path, hf_model: Any, hf_logprobs: Any, make_groups: Any, tp: int
) -> None:
    (group,) = make_groups(num_groups=1, samples=4, vocab=49152)
    ours = launch(tp, score, smollm2, group)
    model = hf_model(smollm2)
    for row, got in zip(group.to_pylist(), ours[0], strict=True):
        wanted = hf_logprobs(model, row["prompt_ids"], row["response_ids"]).detach().numpy()
        np.testing.assert_allclose(got, wanted, atol=1e-4)
