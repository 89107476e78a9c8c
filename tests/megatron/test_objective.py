"""The loss of one micro-batch: what is weighted by what, and which log-probabilities are compared."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.megatron.objective import Denominators, Objective

pytestmark = pytest.mark.megatron

THETA, PROX, BEHAVE, REF = -1.0, -1.5, -1.9, -1.2
RHO = math.exp(PROX - BEHAVE)


def of_one_token(columns: dict[str, float], **settings: Any) -> tuple[float, float, dict[str, Any]]:
    """Loss, its gradient, and metrics, of one token with advantage 2 whose log-probability is THETA."""
    config = ActorUpdate.Config(model="m", groups_per_step=1, **settings)
    given = {"advantages": 2.0, "rollout_logprobs": BEHAVE, "ref_logprobs": REF, **columns}
    batch: Any = SimpleNamespace(
        columns={name: torch.tensor([value]) for name, value in given.items()} | {"loss_mask": torch.tensor([True])},
        sample_index=torch.tensor([0]),
    )
    theta = torch.tensor([THETA], requires_grad=True)
    counts = Denominators(num_tokens=1, num_samples=1)
    loss, report = Objective(settings=config, denominators=counts, compare_rollout=True)(theta, torch.zeros(1), batch)
    (gradient,) = torch.autograd.grad(loss, theta)
    return report.loss, gradient.item(), report.sums


def test_the_clipped_loss_is_weighted_and_the_kl_is_not() -> None:
    settings = {"clip_high": 0.5, "kl_coef": 0.1, "kl": "k2", "correction": Correction(kind="tis", high=10.0)}
    loss, gradient, _ = of_one_token({"old_logprobs": PROX}, **settings)
    d = THETA - REF
    assert loss == pytest.approx(RHO * -2.0 * 1.5 + 0.1 * d * d / 2)  # exp(THETA - PROX) = 1.65 is cut to 1.5
    assert gradient == pytest.approx(0.1 * d)


def test_the_weight_is_from_before_the_update_and_has_no_gradient() -> None:
    settings = {"clip_high": 1.0, "correction": Correction(kind="tis", high=10.0)}
    _, gradient, sums = of_one_token({"old_logprobs": PROX}, **settings)
    assert gradient == pytest.approx(-2.0 * RHO * math.exp(THETA - PROX))
    assert sums["rollout/weight"] == pytest.approx((RHO, 1.0))


def test_current_log_probabilities_are_those_before_the_update_where_there_is_no_column() -> None:
    _, gradient, _ = of_one_token({}, correction=Correction(kind="tis", high=10.0))
    assert gradient == pytest.approx(-2.0 * math.exp(THETA - BEHAVE))


def test_without_a_correction_the_mismatch_weighs_nothing() -> None:
    _, gradient, sums = of_one_token({"old_logprobs": PROX}, clip_high=1.0)
    assert gradient == pytest.approx(-2.0 * math.exp(THETA - PROX))
    assert sums["rollout/weight"] == pytest.approx((RHO, 1.0))


def test_the_rollouts_own_log_probabilities_are_compared_with_the_current_ones() -> None:
    columns = {"old_logprobs": BEHAVE, "rollout_logprobs": BEHAVE}
    _, _, sums = of_one_token(columns, old_logprobs="rollout")
    assert sums["rollout/logprob_diff"] == pytest.approx((THETA - BEHAVE, 1.0))
