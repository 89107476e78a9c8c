"""Log-probabilities agree with transformers, for every architecture, tied and untied, whole and in two pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron.layout import Layout

pytestmark = pytest.mark.megatron


def score(world: World, folder: Path, group: pa.RecordBatch, tp: int, temperature: float, micro: int) -> list[Any]:
    stage = RefLogprob(
        RefLogprob.Config(model=str(folder), layout=Layout(tp=tp), temperature=temperature, micro_batch_size=micro)
    )
    stage.setup(world)
    return stage.process(group)["ref_logprobs"].to_pylist()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2])
def test_agrees_with_transformers(
    launch: Any, tiny: Any, hf_model: Any, hf_logprobs: Any, make_groups: Any, kind: str, tied: bool, tp: int
) -> None:
    folder, (group,) = tiny(kind, tied), make_groups(num_groups=1, samples=5)
    ours = launch(tp, score, folder, group, tp, 0.7, 2)
    model = hf_model(folder)
    for row, got in zip(group.to_pylist(), ours[0], strict=True):
        wanted = hf_logprobs(model, row["prompt_ids"], row["response_ids"], 0.7).detach().numpy()
        np.testing.assert_allclose(got, wanted, atol=1e-5)
