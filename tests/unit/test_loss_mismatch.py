from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rollstream.stages.base import LARGEST, SMALLEST, Metrics
from rollstream.stages.loss.correction import correction_weights
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.loss.mismatch import mismatch

VECTORS = {v["name"]: v for v in json.loads((Path(__file__).parents[1] / "data/algo_vectors.json").read_text())}


def measured(log_ratio: torch.Tensor, mask: torch.Tensor, kind: str = "tis") -> tuple[dict, float]:
    log_ratio = torch.where(mask, log_ratio, 0.0)
    weights, cut = correction_weights(log_ratio, mask, torch.zeros(len(mask)), Correction(kind=kind))
    return mismatch(log_ratio, weights, cut, mask)


def test_weights_are_reported_as_in_the_vectors():
    vector = VECTORS["offpolicy.verl.is.token.2.0"]
    prox, behave = (
        torch.tensor(vector["inputs"][n]).double().flatten() for n in ("train_log_prob", "rollout_log_prob")
    )
    mask = torch.tensor(vector["inputs"]["response_mask"]).bool().flatten()
    found, squares = measured(prox - behave, mask)
    wanted, (weight, num_tokens) = vector["expected"]["metrics"], found["rollout/weight"]
    assert weight / num_tokens == pytest.approx(wanted["rollout_is_mean"], abs=1e-7)
    assert weight**2 / squares / num_tokens == pytest.approx(wanted["rollout_is_eff_sample_size"], abs=1e-7)
    assert found["rollout/weight_cut"] == (2.0, 12.0)


def test_divergences_equal_their_definition():
    d = torch.tensor([0.5, -0.25, 9.0], dtype=torch.float64)
    found, _ = measured(d, torch.tensor([True, True, False]), "none")
    assert found["rollout/logprob_diff"] == (0.75, 2.0)
    assert found["rollout/mismatch_kl"] == (-0.25, 2.0)
    k3 = math.exp(0.5) - 1 - 0.5 + math.exp(-0.25) - 1 + 0.25
    assert found["rollout/mismatch_k3"] == pytest.approx((k3, 2.0))
    assert found["rollout/weight"] == pytest.approx((math.exp(0.5) + math.exp(-0.25), 2.0))
    assert found["rollout/weight_cut"] == (0.0, 2.0)


def test_extremes_are_of_the_ratios_before_any_cut():
    found, _ = measured(torch.tensor([4.0, -3.0, 300.0]).double(), torch.tensor([True, True, False]))
    assert found["rollout/ratio_max"] == pytest.approx((math.exp(4.0), LARGEST))
    assert found["rollout/ratio_min"] == pytest.approx((math.exp(-3.0), SMALLEST))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_masked_tokens_are_no_extremes(sign):
    found, _ = measured(sign * torch.tensor([2.0, 1.0, 0.0]).double(), torch.tensor([True, True, False]))
    ends = sorted((math.exp(sign), math.exp(2 * sign)))
    assert [found[f"rollout/ratio_{end}"][0] for end in ("min", "max")] == pytest.approx(ends)


def test_overflow_stays_finite():
    found, squares = measured(torch.tensor([200.0, -200.0]), torch.tensor([True, True]))
    assert squares == 4.0
    assert all(math.isfinite(total) for total, _ in found.values())


def test_a_cut_changes_nothing():
    d, mask = torch.randn(64, generator=torch.Generator().manual_seed(2)).double(), torch.arange(64) % 3 > 0
    whole, squares = measured(d, mask)
    parts, part_squares = Metrics(), 0.0
    for part in torch.arange(64).split([1, 30, 33]):  # the first token is masked: a part of nothing
        found, more = measured(d[part], mask[part])
        parts.merge(found)
        part_squares += more
    assert {name: parts.sums[name] for name in whole} == {name: pytest.approx(whole[name]) for name in whole}
    assert part_squares == pytest.approx(squares)
