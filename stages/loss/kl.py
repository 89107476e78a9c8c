"""Divergence of the policy from the reference, as a loss of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.stages.loss import KL_KINDS

#: |logprobs - ref_logprobs| above which k3 is constant: exp(20) is 5e8, and safe in float32.
MAX_LOG_RATIO = 20.0


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) at each token, [T], 0 where `mask` is false.

    All inputs are flat, [T]; with d = logprobs - ref_logprobs (Schulman, "Approximating KL divergence", 2020):

        kind   value             expected gradient, over tokens that the policy itself sampled
        k1     d                 0: the score has mean zero, so it regularises nothing
        k2     d^2 / 2           of KL(policy || reference)
        k3     exp(-d) - 1 + d   of KL(reference || policy), the other divergence
        k1+    d                 of KL(policy || reference), taken from k2
        k3+    exp(-d) - 1 + d   of KL(policy || reference), taken from k2

    Use "k3+": its value is unbiased and never negative, and its gradient is the right one. d is masked before `exp`, so
    that masked slots may hold anything. Only k3 has an `exp`: there d is clamped to +-20, beyond which plain k3 has
    gradient 0; the gradients taken from k2 are d itself and are never cut.

    Raises ValueError for a kind that is not in `KL_KINDS`.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"KL kind must be one of {', '.join(KL_KINDS)}, got {kind!r}")
    d = torch.where(mask, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    value = _value(d, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    k2 = _value(d, "k2")
    return value.detach() + (k2 - k2.detach())


def _value(d: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d
