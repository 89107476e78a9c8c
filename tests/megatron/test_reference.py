"""Reference and policy agree while they have the same weights; packed samples do not see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.schema import PER_TOKEN

pytestmark = pytest.mark.megatron


def score(world: World, folder: Path, groups: list[pa.RecordBatch], micro_batch_size: int = 100) -> list[list[Any]]:
    config = RefLogprob.Config(
        model=str(folder), temperature=0.7, layout=Layout(tp=world.size), micro_batch_size=micro_batch_size
    )
    stage = RefLogprob(config)
    stage.setup(world)
    return [stage.process(group)["ref_logprobs"].to_pylist() for group in groups]


def kl_at_first_step(world: World, folder: Path, groups: list[pa.RecordBatch]) -> tuple[dict[str, Any], int]:
    """Scores the groups with a reference, then trains one step on them, in the same process."""
    reference = RefLogprob(RefLogprob.Config(model=str(folder), temperature=0.7, micro_batch_size=3))
    reference.setup(World())
    scored: list[pa.RecordBatch] = []
    for group in groups:
        (column,) = reference.process(group).values()
        assert column.type == PER_TOKEN
        for name in ("ref_logprobs", "rollout_logprobs"):
            group = group.set_column(group.schema.names.index(name), name, column)
        scored.append(group)
    reference.close()
    actor = ActorUpdate(ActorUpdate.Config(model=str(folder), groups_per_step=4, temperature=0.7, kl_coef=0.1))
    actor.has_ref = True
    actor.setup(world)
    return actor.update(scored), len(scored)


def test_first_step_has_ratio_1_and_kl_0(launch: Any, tiny: Any, make_groups: Any) -> None:
    ((metrics, _),) = launch(1, kl_at_first_step, tiny("qwen3"), make_groups())
    tokens = metrics["actor/tokens"][0]
    assert metrics["actor/ratio"] == (tokens, tokens)
    assert metrics["ref/kl"][0] / tokens <= 1e-6
    assert metrics["rollout/logprob_diff"][0] / tokens <= 1e-5


@pytest.mark.parametrize("tp", [1, 2])
def test_a_sample_does_not_change_its_neighbours(launch: Any, tiny: Any, make_groups: Any, tp: int) -> None:
    (group,) = make_groups(num_groups=1, samples=5)
    responses = group.column("response_ids").to_pylist()
    responses[1] = [(token + 1) % 131 for token in responses[1]]
    index = group.schema.names.index("response_ids")
    changed = group.set_column(index, group.schema.field(index), pa.array(responses, pa.list_(pa.int32())))
    before, after = launch(tp, score, tiny("qwen2"), [group, changed])[0]
    assert before[1] != after[1]
    assert [row for i, row in enumerate(before) if i != 1] == [row for i, row in enumerate(after) if i != 1]


def test_empty_responses_have_empty_rows(launch: Any, tiny: Any, make_groups: Any) -> None:
    (group,) = make_groups(num_groups=1, samples=3)
    ((rows,),) = launch(1, score, tiny("llama"), [group], 1)
    assert [len(row) for row in rows] == group.column("response_ids").value_lengths().to_pylist()
    assert rows[-1] == []


def test_empty_prompt_is_named(launch: Any, tiny: Any, make_groups: Any) -> None:
    (group,) = make_groups(num_groups=1)
    index = group.schema.names.index("prompt_ids")
    empty = group.set_column(index, group.schema.field(index), pa.array([[], [], []], pa.list_(pa.int32())))
    with pytest.raises(AssertionError, match="sample 'g0-0' has an empty prompt"):
        launch(1, score, tiny("llama"), [empty])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_fewer_samples_than_a_pipeline_takes_at_a_time(launch: Any, tiny: Any, make_groups: Any, num_rows: int) -> None:
    def piped(world: World, layout: Layout) -> list[Any]:
        stage = RefLogprob(RefLogprob.Config(model=str(tiny("llama", False, 4)), layout=layout))
        stage.setup(world)
        return stage.process(make_groups(num_groups=1)[0].slice(0, num_rows))["ref_logprobs"].to_pylist()

    found, wanted = launch(2, piped, Layout(pp=2, vpp=2))[0], launch(1, piped, Layout())[0]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
