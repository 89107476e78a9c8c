from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rollstream.stages.loss import KL_KINDS
from rollstream.stages.loss.kl import kl_loss

VECTORS = {v["name"]: v for v in json.loads((Path(__file__).parents[1] / "data/algo_vectors.json").read_text())}


def pair(vector: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs (with gradient), reference log-probs and an all-true mask, each [T], in float64."""
    logprobs, ref = (torch.tensor(vector["inputs"][k], dtype=torch.float64) for k in ("logprob", "ref_logprob"))
    return logprobs.requires_grad_(), ref, torch.ones(len(ref), dtype=torch.bool)


@pytest.mark.parametrize(("name", "kind"), [("kl.verl.k1", "k1"), ("kl.verl.k2", "k2")])
def test_values_equal_the_vectors(name, kind):
    expected = torch.tensor(VECTORS[name]["expected"]["kl"], dtype=torch.float64)
    torch.testing.assert_close(kl_loss(*pair(VECTORS[name]), kind), expected, atol=2e-8, rtol=0)


def test_k3_values_equal_the_vector_up_to_the_clamp():
    vector = VECTORS["kl.slime.k3"]
    value = kl_loss(*pair(vector), "k3").tolist()
    assert value[:5] == pytest.approx(vector["expected"]["kl"][:5], rel=1e-4, abs=1e-7)
    assert value[5] == pytest.approx(math.exp(20) - 1 - 20)  # d = -29.5 is held at -20


@pytest.mark.parametrize(("kind", "plain"), [("k1+", "k1"), ("k3+", "k3")])
def test_plus_kinds_have_the_value_of_one_and_the_gradient_of_k2(kind, plain):
    vector = VECTORS[f"kl.verl.straight_through.{kind}"]
    logprobs, ref, mask = pair(vector)
    loss = kl_loss(logprobs, ref, mask, kind)
    loss.sum().backward()
    expected = torch.tensor(vector["expected"]["grad_logprob"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected, atol=2e-8, rtol=0)
    assert torch.equal(loss.detach(), kl_loss(logprobs, ref, mask, plain).detach())


def test_gradient_of_k2_equals_the_vector():
    vector = VECTORS["kl.verl.naive_grad.k2"]
    logprobs, ref, mask = pair(vector)
    kl_loss(logprobs, ref, mask, "k2").sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(vector["expected"]["grad_logprob"], abs=2e-8)


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("k1", None),
        ("k2", "true_reverse_kl_grad"),
        ("k3", "forward_kl_grad"),
        ("k1+", "true_reverse_kl_grad"),
        ("k3+", "true_reverse_kl_grad"),
    ],
)
def test_expected_gradient_by_enumeration(kind, entry):
    vector = VECTORS["kl.expected_gradient_table"]
    logits = torch.tensor(vector["inputs"]["theta_logits"], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(vector["inputs"]["ref_probs"], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    loss = kl_loss(logprobs, ref, torch.ones(4, dtype=torch.bool), kind)
    (logprobs.exp().detach() * loss).sum().backward()
    expected = [0.0] * 4 if entry is None else vector["expected"][entry]
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e4])
def test_masked_slots_may_hold_anything(kind, junk):
    logprobs = torch.tensor([-0.5, junk, -1.0], requires_grad=True)
    ref = torch.tensor([-0.7, -junk, -2.0])
    loss = kl_loss(logprobs, ref, torch.tensor([True, False, True]), kind)
    loss.sum().backward()
    assert loss[1] == 0
    assert logprobs.grad[1] == 0
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("kind", KL_KINDS)
def test_zero_where_policy_and_reference_agree(kind):
    logprobs = torch.tensor([-0.5, -7.0])
    assert kl_loss(logprobs, logprobs, torch.tensor([True, True]), kind).tolist() == [0.0, 0.0]


def test_unknown_kind_lists_the_known():
    with pytest.raises(ValueError, match=r"k1, k2, k3, k1\+, k3\+, got 'k4'"):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.tensor([True]), "k4")
