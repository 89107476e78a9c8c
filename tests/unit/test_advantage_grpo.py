from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.stages.advantage.grpo import grpo

VECTORS = {v["name"]: v for v in json.loads((Path(__file__).parents[1] / "data/algo_vectors.json").read_text())}

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=10)


def by_group(vector: dict, values: list[float]) -> list[list[float]]:
    """Values cut into the vector's groups, without its group of one, on which implementations differ."""
    groups: dict[str, list[float]] = {}
    for group, value in zip(vector["inputs"]["group"], values, strict=True):
        groups.setdefault(group, []).append(value)
    return [g for g in groups.values() if len(g) > 1]


@pytest.mark.parametrize(
    ("name", "entry", "scale_by_std", "eps"),
    [
        ("adv.grpo.verl.std", "seq_advantage", True, 1e-6),
        ("adv.grpo.verl.dr_grpo_nostd", "seq_advantage", False, 1e-6),
        ("adv.grpo.near_zero_variance", "verl_scalar", True, 1e-6),
        ("adv.grpo.trl.scale_group", "advantages", True, 1e-4),
        ("adv.grpo.trl.scale_none", "advantages", False, 1e-4),
    ],
)
def test_advantages_equal_the_vectors(name, entry, scale_by_std, eps):
    vector = VECTORS[name]
    expected = by_group(vector, vector["expected"][entry])
    for rewards, wanted in zip(by_group(vector, vector["inputs"]["rewards"]), expected, strict=True):
        got = grpo(np.array(rewards), scale_by_std=scale_by_std, eps=eps)
        np.testing.assert_allclose(got, wanted, atol=1e-9)


@pytest.mark.parametrize("reward", [100.1, 0.1, -1e-30, 1e30])
def test_equal_rewards_have_advantage_exactly_zero(reward):
    assert grpo(np.full(7, reward), scale_by_std=True, eps=0.0).tolist() == [0.0] * 7


@pytest.mark.parametrize("rewards", [[1.0], [np.nan], [np.nan, 3.0, np.nan]])
def test_a_reward_without_company_has_advantage_zero(rewards):
    assert grpo(np.array(rewards), scale_by_std=True, eps=1e-6).tolist() == [0.0] * len(rewards)


def test_an_unknown_reward_leaves_the_others_as_without_it():
    got = grpo(np.array([1.0, np.nan, 0.0, 0.5]), scale_by_std=True, eps=1e-6)
    assert got[1] == 0
    assert got[[0, 2, 3]].tolist() == grpo(np.array([1.0, 0.0, 0.5]), scale_by_std=True, eps=1e-6).tolist()


@given(rewards=REWARDS, seed=st.integers(0, 99))
def test_order_does_not_matter(rewards, seed):
    values = np.array(rewards)
    order = np.random.default_rng(seed).permutation(len(values))
    got = grpo(values[order], scale_by_std=True, eps=1e-6)
    np.testing.assert_allclose(got, grpo(values, scale_by_std=True, eps=1e-6)[order], atol=1e-9, rtol=1e-6)


@given(rewards=REWARDS)
def test_advantages_of_a_group_sum_to_zero(rewards):
    got = grpo(np.array(rewards), scale_by_std=True, eps=1e-6)
    assert np.isfinite(got).all()
    assert abs(got.sum()) < 1e-6
