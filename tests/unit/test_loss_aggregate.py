from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.stages.loss import AGGREGATIONS
from rollstream.stages.loss.aggregate import token_weights

VECTORS = {v["name"]: v for v in json.loads((Path(__file__).parents[1] / "data/algo_vectors.json").read_text())}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss_equals_the_vector_and_ignores_nan_under_the_mask(mode):
    vector = VECTORS["agg.required.nan_at_masked_position"]
    losses = torch.tensor([[float(x) for x in row] for row in vector["inputs"]["loss_mat"]]).double()
    mask = torch.tensor(vector["inputs"]["loss_mask"]).bool().flatten()
    losses = torch.where(mask, losses.flatten(), 0.0)  # a loss of ours is 0 under the mask
    index = torch.arange(4).repeat_interleave(5)
    weights = token_weights(mask, index, mode, num_tokens=13, num_samples=4, max_tokens=8)
    assert (weights * losses).sum().item() == pytest.approx(vector["expected"][mode], abs=2e-7)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_two_ranks_of_two_micro_batches_add_up_to_the_vector(mode):
    vector = VECTORS[f"agg.verl.{mode}.dp2_micro1"]
    total = 0.0
    for losses, mask in zip(vector["inputs"]["loss_mat"], vector["inputs"]["loss_mask"], strict=True):
        mask = torch.tensor(mask).bool()
        weights = token_weights(mask, torch.zeros(5).long(), mode, num_tokens=13, num_samples=4, max_tokens=8)
        total += (weights * torch.tensor(losses)).sum().item()
    assert total == pytest.approx(vector["expected"]["single_process"], abs=1e-6)


@st.composite
def steps(draw) -> tuple[list[list[bool]], list[int]]:
    """Masks of the samples of a step (some empty, some fully masked), and the micro-batch that each sample goes to."""
    masks = draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=8))
    return masks, draw(st.lists(st.integers(0, 2), min_size=len(masks), max_size=len(masks)))


def weights_of(masks: list[list[bool]], labels: list[int], mode: str, counts: dict[str, int]) -> dict[int, list[float]]:
    """Weights by sample, computed in one micro-batch."""
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    index = torch.tensor([i for i, row in zip(labels, masks, strict=True) for _ in row], dtype=torch.long)
    weights = token_weights(mask, index, mode, **counts)
    return {i: weights[index == i].tolist() for i in labels}


@settings(deadline=None)
@given(step=steps(), mode=st.sampled_from(AGGREGATIONS))
def test_weights_do_not_depend_on_the_split_into_micro_batches(step, mode):
    masks, places = step
    counts = {"num_tokens": sum(map(sum, masks)), "num_samples": len(masks), "max_tokens": 7}
    whole = weights_of(masks, list(range(len(masks))), mode, counts)
    for place in set(places):
        labels = [i for i, p in enumerate(places) if p == place]
        part = weights_of([masks[i] for i in labels], labels, mode, counts)
        assert all(part[i] == whole[i] for i in labels)


@settings(deadline=None)
@given(step=steps())
def test_token_mean_weights_sum_to_one(step):
    masks, _ = step
    num_tokens = sum(map(sum, masks))
    counts = {"num_tokens": num_tokens, "num_samples": len(masks), "max_tokens": 7}
    weights = weights_of(masks, list(range(len(masks))), "token-mean", counts)
    assert sum(sum(w) for w in weights.values()) == pytest.approx(1.0 if num_tokens else 0.0, abs=1e-5)


def test_a_fully_masked_sample_counts_in_the_denominator():
    mask, index = torch.tensor([True, True, False, False]), torch.tensor([5, 5, 9, 9])
    weights = token_weights(mask, index, "seq-mean-token-mean", num_tokens=2, num_samples=2, max_tokens=4)
    assert weights.tolist() == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_micro_batch_without_tokens_has_no_weights(mode):
    empty = torch.zeros(0, dtype=torch.bool)
    assert token_weights(empty, empty.long(), mode, num_tokens=9, num_samples=3, max_tokens=4).tolist() == []


def test_unknown_mode_lists_the_known():
    with pytest.raises(ValueError, match="token-mean, seq-mean-token-mean, seq-mean-token-sum-norm, got 'mean'"):
        token_weights(torch.ones(1).bool(), torch.zeros(1), "mean", num_tokens=1, num_samples=1, max_tokens=1)
