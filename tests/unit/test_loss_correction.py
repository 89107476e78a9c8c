from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rollstream.stages.errors import ConfigError
from rollstream.stages.loss.correction import behaviour_log_ratio, correction_weights
from rollstream.stages.loss.correction_settings import DEFAULT_BOUNDS, Correction
from rollstream.stages.loss.ppo_clip import ppo_clip

VECTORS = {v["name"]: v for v in json.loads((Path(__file__).parents[1] / "data/algo_vectors.json").read_text())}
KINDS = [kind for kind in DEFAULT_BOUNDS if kind != "none"]

#: Vector, name of the weights in it, correction. TRL and slime have weight 1 at masked tokens: not compared.
CASES = [
    ("offpolicy.verl.is.token.2.0", "weights", Correction(kind="tis")),
    ("offpolicy.slime.tis", "weights", Correction(kind="tis")),
    ("offpolicy.trl.token_truncate.0.5_2.0", "ratio", Correction(kind="tis", low=0.5)),
    ("offpolicy.slime.icepop", "weights", Correction(kind="mask")),
    ("offpolicy.trl.token_mask.None_3.0", "ratio", Correction(kind="mask", low=0.0, high=3.0)),
    ("offpolicy.areal.token_mask_0.5_2", "behave_imp_weight", Correction(kind="mask", high=2.0)),
    ("offpolicy.verl.is.sequence.2.0", "weights", Correction(kind="seq-tis")),
    ("offpolicy.trl.sequence_truncate.0.5_2.0", "ratio", Correction(kind="seq-tis", low=0.5)),
]


def given(vector: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trainer's and rollout's log-probabilities, mask and samples of a vector, each [T], in float64."""
    inputs = vector["inputs"]
    prox, behave = (
        torch.tensor(inputs[next(n for n in names if n in inputs)], dtype=torch.float64).flatten()
        for names in (("prox_log_prob", "train_log_prob"), ("behave_log_prob", "rollout_log_prob"))
    )
    return prox, behave, torch.tensor(inputs["response_mask"]).bool().flatten(), torch.arange(4).repeat_interleave(5)


def weights_of(vector: dict, settings: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    prox, behave, mask, sample = given(vector)
    return correction_weights(behaviour_log_ratio(prox, behave, mask), mask, sample, settings)


def of_ratios(ratios: list[float], settings: Correction, sample: list[int] | None = None) -> list[float]:
    log_ratio = torch.tensor(ratios).log()
    index = torch.tensor(sample or [0] * len(ratios))
    return correction_weights(log_ratio, torch.ones(len(ratios)).bool(), index, settings)[0].tolist()


@pytest.mark.parametrize(("name", "key", "settings"), CASES, ids=[f"{n} {s.kind}" for n, _, s in CASES])
def test_weights_equal_the_vectors(name, key, settings):
    vector = VECTORS[name]
    *_, mask, _ = given(vector)
    expected = torch.tensor(vector["expected"][key], dtype=torch.float64).expand(4, 5).flatten()
    weights, _ = weights_of(vector, settings)
    torch.testing.assert_close(weights[mask], expected[mask], atol=2e-7, rtol=0)
    assert weights[~mask].tolist() == [0.0] * int((~mask).sum())


@pytest.mark.parametrize(
    ("name", "high"), [("offpolicy.areal.token_mask_ratio5", 5.0), ("offpolicy.areal.token_mask_0.5_2", 2.0)]
)
def test_loss_and_gradient_of_the_decoupled_objective_equal_the_vectors(name, high):
    vector = VECTORS[name]
    prox, _, mask, _ = given(vector)
    theta, advantages = (
        torch.tensor(vector["inputs"][n], dtype=torch.float64).flatten() for n in ("log_prob", "advantages")
    )
    theta.requires_grad_()
    low = vector["params"].get("lower", 0.0)
    weights, cut = weights_of(vector, Correction(kind="mask", low=low, high=high))
    per_token, _ = ppo_clip(theta, prox, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=None)
    loss = (weights * per_token).sum() / mask.sum()  # rejected tokens stay in the denominator
    loss.backward()
    wanted = vector["expected"]
    assert loss.item() == pytest.approx(wanted["loss"], abs=2e-6)
    torch.testing.assert_close(
        theta.grad, torch.tensor(wanted["grad_log_prob"], dtype=torch.float64).flatten(), atol=2e-6, rtol=0
    )
    assert cut.sum().item() / mask.sum().item() == pytest.approx(wanted["filtered_fraction"])


def test_samples_are_filtered_by_their_geometric_mean_and_keep_the_tokens_ratios():
    vector = VECTORS["offpolicy.areal.seq_geo_mask_0.9_1.1"]
    prox, behave, mask, sample = given(vector)
    kept = torch.tensor(vector["expected"]["behave_imp_weight"]).flatten() > 0
    weights, cut = weights_of(vector, Correction(kind="seq-mask", low=0.9, high=1.1))
    assert torch.equal(weights > 0, kept & mask)
    assert torch.equal(cut, mask & ~kept)
    torch.testing.assert_close(weights[sample == 0], (prox - behave).exp()[sample == 0])


def test_sequence_rules_read_only_the_trained_tokens_of_a_sample():
    log_ratio = torch.tensor([0.3, 0.2, -0.1, 0.4])
    mask = torch.tensor([True, False, True, True])
    weights, _ = correction_weights(
        torch.where(mask, log_ratio, 0.0), mask, torch.tensor([7, 7, 7, 3]), Correction(kind="seq-tis")
    )
    assert weights.tolist() == pytest.approx([math.exp(0.2), 0.0, math.exp(0.2), math.exp(0.4)])


@pytest.mark.parametrize(
    ("kind", "expected"), [("tis", 2.0), ("mask", 0.0), ("seq-tis", 2.0), ("seq-mask", 0.0)], ids=KINDS
)
def test_overflow_meets_the_bound(kind, expected):
    log_ratio = torch.tensor([200.0])
    weights, cut = correction_weights(log_ratio, torch.tensor([True]), torch.tensor([0]), Correction(kind=kind))
    assert weights.tolist() == [expected]
    assert cut.tolist() == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_masked_tokens_may_hold_anything(kind, junk):
    mask, sample = torch.tensor([True, False, True]), torch.tensor([0, 0, 1])
    theta = torch.tensor([-1.0, junk, -2.0], requires_grad=True)
    prox, behave = torch.tensor([-1.1, junk, -2.0]), torch.tensor([-1.1, -junk, -2.0])
    weights, _ = correction_weights(behaviour_log_ratio(prox, behave, mask), mask, sample, Correction(kind=kind))
    per_token, _ = ppo_clip(theta, prox, torch.ones(3), mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    (weights * per_token).sum().backward()
    assert theta.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0, -1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_taken_for_a_rejected_token(kind):
    assert math.isnan(of_ratios([math.nan], Correction(kind=kind))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_have_weight_1(kind):
    assert of_ratios([1.0, 1.0, 1.0], Correction(kind=kind), [0, 0, 1]) == [1.0, 1.0, 1.0]


def test_weights_have_no_gradient():
    prox = torch.tensor([-1.0], requires_grad=True)
    log_ratio = behaviour_log_ratio(prox, torch.tensor([-1.5]), torch.tensor([True]))
    weights, _ = correction_weights(log_ratio, torch.tensor([True]), torch.tensor([0]), Correction(kind="tis"))
    assert not weights.requires_grad
    assert not log_ratio.requires_grad
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "tsi"}, "correction kind must be one of the known, got 'tsi': did you mean 'tis'?"),
        ({"low": 0.5}, "kind 'none' takes no bounds, got 0.5 and None"),
        ({"kind": "tis", "low": -0.1}, "low must be from 0 to 1, the ratio of equal policies, got -0.1"),
        ({"kind": "tis", "high": 0.9}, "high must be at least 1, the ratio of equal policies, got 0.9"),
        ({"kind": "mask", "high": math.inf}, "high must be at least 1, the ratio of equal policies, got inf"),
        ({"kind": "mask", "high": math.nan}, "high must be at least 1, the ratio of equal policies, got nan"),
        ({"kind": "seq-mask", "low": 1.0, "high": 1.0}, "low must be below high=1.0, got 1.0"),
    ],
)
def test_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        Correction(**settings)
    (fault,) = error.value.faults
    assert message in fault
