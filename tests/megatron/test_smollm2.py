"""The demo's model, in full size: log-probabilities agree with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.rollout import Rollout
from rollstream.stages.schema import Prompted

pytestmark = pytest.mark.megatron


def score(world: World, folder: Path, group: pa.RecordBatch, temperature: float = 1.0) -> list[Any]:
    stage = RefLogprob(RefLogprob.Config(model=str(folder), layout=Layout(tp=world.size), temperature=temperature))
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


def test_the_engines_logprobs_are_the_trainers(launch: Any, smollm2: Path) -> None:
    ids = [1, 4093, 198, 1780, 314, 216, 39, 1232, 216, 41, 47, 2, 198, 1, 520, 9531, 198]
    values = ["g", 0, "", ids, "null", "{}"]
    prompt = pa.RecordBatch.from_arrays(
        [pa.array([v], t) for v, t in zip(values, Prompted.columns.values(), strict=True)], schema=Prompted.arrow()
    )
    rollout = Rollout(Rollout.Config(model=str(smollm2), n=4, max_tokens=8, temperature=0.7))
    rollout.setup(World(threads=1))
    (group,) = rollout.run([prompt])
    trainers = launch(1, score, smollm2, group, 0.7)[0]
    for got, wanted in zip(group.column("rollout_logprobs").to_pylist(), trainers, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
