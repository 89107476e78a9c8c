from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from rollstream.stages.advantage import Advantage
from rollstream.stages.errors import ConfigError, StageError
from rollstream.stages.schema import Scored


def scored(rewards: list[float | None], masks: list[list[bool]]) -> pa.RecordBatch:
    """A group with these rewards and loss masks."""
    rows = [
        {
            "group_id": "g",
            "order": 0,
            "prompt": "p",
            "prompt_ids": [1],
            "target": "null",
            "meta": "{}",
            "sample_id": f"g.{i}",
            "response": "",
            "response_ids": [2] * len(mask),
            "loss_mask": mask,
            "finish_reason": "stop",
            "rollout_logprobs": [-1.0] * len(mask),
            "weight_version": [0] * len(mask),
            "reward": reward,
            "reward_parts": [],
        }
        for i, (reward, mask) in enumerate(zip(rewards, masks, strict=True))
    ]
    return pa.RecordBatch.from_pylist(rows, schema=Scored.arrow())


def test_advantages_go_to_every_token_of_the_policy():
    stage = Advantage(Advantage.Config(scale_by_std=False))
    part = stage.run(scored([1.0, 0.0], [[True, False, True], [True]]))
    assert part.column("sample_id").to_pylist() == ["g.0", "g.1"]
    assert part.column("advantages").to_pylist() == [[0.5, 0.0, 0.5], [-0.5]]


def test_a_null_reward_has_advantage_zero():
    part = Advantage().run(scored([1.0, None, 0.0], [[True], [True, True], [True]]))
    first, second, third = part.column("advantages").to_pylist()
    assert second == [0.0, 0.0]
    assert first[0] == -third[0] == pytest.approx(np.sqrt(0.5), abs=1e-5)


def test_a_row_without_tokens_keeps_its_place():
    part = Advantage(Advantage.Config(scale_by_std=False)).run(scored([1.0, 0.0], [[], [True, True]]))
    assert part.column("advantages").to_pylist() == [[], [-0.5, -0.5]]


def test_a_group_that_was_cut_from_a_larger_batch_is_read_from_its_own_rows():
    whole = scored([5.0, 1.0, 0.0], [[True, True], [True, False], [True]])
    part = Advantage(Advantage.Config(scale_by_std=False)).run(whole.slice(1))
    assert part.column("advantages").to_pylist() == [[0.5, 0.0], [-0.5]]


@pytest.mark.parametrize(
    ("rewards", "zero_variance", "singleton"),
    [([1.0, 0.0], 0, 0), ([2.0, 2.0], 1, 0), ([None, 2.0], 0, 1), ([None, None], 0, 1), ([2.0], 0, 1)],
)
def test_groups_that_teach_nothing_are_counted(rewards, zero_variance, singleton):
    stage = Advantage()
    stage.run(scored(rewards, [[True]] * len(rewards)))
    sums = stage.metrics.take()
    assert sums["advantage/zero_variance_groups"] == (zero_variance, 1)
    assert sums["advantage/singleton_groups"] == (singleton, 1)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_names_its_sample(broken):
    with pytest.raises(StageError, match="must be a finite number") as error:
        Advantage().run(scored([1.0, None, broken], [[True]] * 3))
    assert error.value.subject == "g.2"


def test_mean_size_is_over_samples():
    stage = Advantage(Advantage.Config(scale_by_std=False))
    stage.run(scored([1.0, 0.0], [[True, True, True], [True]]))
    assert stage.metrics.take()["advantage/mean_abs"] == (1.0, 2)


def test_every_fault_of_the_settings_is_listed():
    with pytest.raises(ConfigError) as error:
        Advantage.Config(estimator="gpro", eps=-1)
    assert "did you mean 'grpo'? Known: grpo" in error.value.faults[0]
    assert error.value.faults[1] == "eps must be 0 or above, got -1"


def test_importing_the_stage_loads_nothing_heavy():
    code = "import sys, rollstream.stages.advantage; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
