from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollstream.stages.loss.aggregate import token_weights
from rollstream.stages.loss.ppo_clip import ppo_clip

VECTORS = {v["name"]: v for v in json.loads((Path(__file__).parents[1] / "data/algo_vectors.json").read_text())}

#: Vector, aggregation, clip_low, clip_high, dual_clip, samples counted in the denominator.
CASES = [
    ("loss.ppo_dual_clip.verl.token-mean.hi0.2.c3.0", "token-mean", 0.2, 0.2, 3.0, 4),
    ("loss.ppo_dual_clip.verl.token-mean.hi0.28.c10.0", "token-mean", 0.2, 0.28, 10.0, 4),
    ("loss.ppo_dual_clip.areal", "token-mean", 0.2, 0.2, 3.0, 4),
    ("loss.ppo_dual_clip.verl.seq-mean-token-sum-norm.hi0.2.c3.0", "seq-mean-token-sum-norm", 0.2, 0.2, 3.0, 3),
    ("loss.ppo_dual_clip.verl.seq-mean-token-sum-norm.hi0.28.c10.0", "seq-mean-token-sum-norm", 0.2, 0.28, 10.0, 3),
    ("loss.ppo.openrlhf.sample", "seq-mean-token-mean", 0.2, 0.2, None, 3),
    ("loss.grpo.trl.grpo", "seq-mean-token-mean", 0.2, 0.28, None, 4),
]


def flat(vector: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs (with gradient), old log-probs, advantages and mask of a vector, each [T], in float64."""
    given = vector["inputs"]
    logprobs, old, advantages = (
        torch.tensor(given[k], dtype=torch.float64).flatten() for k in ("log_prob", "old_log_prob", "advantages")
    )
    return logprobs.requires_grad_(), old, advantages, torch.tensor(given["response_mask"]).bool().flatten()


@pytest.mark.parametrize(("name", "mode", "low", "high", "dual", "num_samples"), CASES)
def test_value_and_gradient_equal_the_vectors(name, mode, low, high, dual, num_samples):
    vector = VECTORS[name]
    logprobs, old, advantages, mask = flat(vector)
    loss, _ = ppo_clip(logprobs, old, advantages, mask, clip_low=low, clip_high=high, dual_clip=dual)
    sample = torch.arange(4).repeat_interleave(5)
    counts = {"num_tokens": int(mask.sum()), "num_samples": num_samples, "max_tokens": 5}
    total = (loss * token_weights(mask, sample, mode, **counts)).sum()
    total.backward()
    expected = torch.tensor(vector["expected"]["grad_log_prob"], dtype=torch.float64).flatten()
    assert total.item() == pytest.approx(vector["expected"]["loss"], abs=1e-7)
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-7, rtol=0)


def test_metrics_equal_the_vectors():
    vector = VECTORS["loss.ppo_dual_clip.verl.token-mean.hi0.2.c3.0"]
    _, metrics = ppo_clip(*flat(vector), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    expected = vector["expected"]["metrics"]
    means = {name: total / count for name, (total, count) in metrics.items()}
    assert {count for _, count in metrics.values()} == {12.0}
    assert means["actor/clip_fraction"] == pytest.approx(expected["actor/pg_clipfrac"], abs=1e-8)
    assert means["actor/clip_fraction_lower"] == pytest.approx(expected["actor/pg_clipfrac_lower"], abs=1e-8)
    assert means["actor/kl"] == pytest.approx(expected["actor/ppo_kl"], abs=1e-8)


def test_ratio_is_exactly_one_where_nothing_moved():
    logprobs = torch.tensor([-0.3, -2.7, -11.0])
    mask = torch.tensor([True, True, False])
    loss, metrics = ppo_clip(logprobs, logprobs, torch.ones(3), mask, clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert loss.tolist() == [-1.0, -1.0, 0.0]
    assert metrics["actor/ratio"] == (2.0, 2.0)
    assert metrics["actor/kl"] == (0.0, 2.0)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf"), 1e4, -1e4])
def test_masked_slots_may_hold_anything(junk):
    vector = VECTORS["loss.ppo_dual_clip.verl.token-mean.hi0.2.c3.0"]
    settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    logprobs, old, advantages, mask = flat(vector)
    clean, clean_metrics = ppo_clip(logprobs, old, advantages, mask, **settings)
    (clean_gradient,) = torch.autograd.grad(clean.sum(), logprobs)
    dirty = [torch.where(mask, t.detach(), junk) for t in (logprobs, old, advantages)]
    dirty[0].requires_grad_()
    loss, metrics = ppo_clip(*dirty, mask, **settings)
    loss.sum().backward()
    assert torch.equal(loss, clean)
    assert torch.equal(dirty[0].grad, clean_gradient)
    assert metrics == clean_metrics


def test_overflowing_masked_token_has_gradient_zero_in_float32():
    vector = VECTORS["loss.overflow_at_masked_token"]
    logprobs = torch.tensor(vector["inputs"]["log_prob"][0], requires_grad=True)
    old = torch.tensor(vector["inputs"]["old_log_prob"][0])
    mask = torch.tensor([True, False])
    loss, _ = ppo_clip(logprobs, old, torch.ones(2), mask, clip_low=0.2, clip_high=0.2, dual_clip=None)
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.1051709651947021, 0.0], abs=1e-6)


def test_log_ratio_beyond_twenty_stays_finite():
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0])
    loss, _ = ppo_clip(
        logprobs, old, -torch.ones(2), torch.tensor([True, True]), clip_low=0.2, clip_high=0.2, dual_clip=None
    )
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert logprobs.grad.tolist() == [0.0, 0.0]
