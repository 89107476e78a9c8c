"""Weights of tokens that another policy drew than the one that is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.stages.loss.correction_settings import Correction

#: |log-ratio| above which it is clamped: exp(20) is 5e8, far outside of every bound, and safe in float32.
MAX_LOG_RATIO = 20.0


@torch.no_grad()
def behaviour_log_ratio(prox_logprobs: Tensor, behave_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log of r, [T], 0 where `mask` is false, whatever the inputs hold there; without gradient.

    r = prox / behave, the probability of each token by the trainer at the start of the update, to that by the policy
    that drew it. The mask comes before any `exp`.
    """
    return torch.where(mask, prox_logprobs - behave_logprobs, torch.zeros_like(prox_logprobs))


@torch.no_grad()
def correction_weights(
    log_ratio: Tensor, mask: Tensor, sample_index: Tensor, settings: Correction
) -> tuple[Tensor, Tensor]:
    """Weight of each token, [T], 0 where `mask` is false; and which weights the bounds have changed, bool [T].

    With r_t = exp(log_ratio_t), and products and means over the tokens of t's sample with mask true:

        tis        clip(r_t, low, high)                              Ionides 2008; Yao et al. 2025 (TIS)
        mask       r_t if low <= r_t <= high else 0                  Ling team 2025 (IcePop)
        seq-tis    clip(prod r, low, high)                           Liu et al. 2025, "When speed kills stability"
        seq-mask   r_t if low <= exp(mean log r) <= high else 0      as before; the filter by geometric mean
        none       r_t: what the weights would be

    The loss of a token is weight_t * clipped loss(theta / prox), the decoupled objective of Hilton et al. 2021,
    equation 5. Weights have no gradient. A rejected token stays in the denominators, so it counts as 0.

    `sample_index` [T] labels the tokens' samples; a sample must be whole within its micro-batch. A log-ratio beyond
    +-20 is as good as infinite: it is truncated or rejected by the bounds. NaN stays NaN, so that the step is skipped.

    >>> r = torch.tensor([1.0, 3.0, 0.25])
    >>> correction_weights(r.log(), r > 0, torch.tensor([0, 0, 1]), Correction(kind="mask", low=0.5, high=2.0))
    (tensor([1., 0., 0.]), tensor([False,  True,  True]))
    """
    judged = _over_samples(log_ratio, mask, sample_index, mean=settings.rejects) if settings.per_sample else log_ratio
    ratio = judged.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = settings.bounds
    cut = mask & ((ratio < low) | (ratio > high))
    if settings.rejects:
        weights = torch.where(cut, 0.0, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
    else:
        weights = ratio.clamp(low, high)
    return torch.where(mask, weights, 0.0), cut


def _over_samples(log_ratio: Tensor, mask: Tensor, sample_index: Tensor, *, mean: bool) -> Tensor:
    """Sum, or mean, of each token's sample, [T]; summed in float64, so that long samples lose nothing."""
    _, sample = torch.unique(sample_index, return_inverse=True)
    sums = log_ratio.new_zeros(len(sample), dtype=torch.float64).index_add_(0, sample, log_ratio.double())
    if mean:
        counts = torch.zeros_like(sums).index_add_(0, sample, mask.double())
        sums = sums / counts.clamp(min=1.0)
    return sums[sample].to(log_ratio.dtype)
