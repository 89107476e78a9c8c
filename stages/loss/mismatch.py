"""How far the policy that drew the samples is from the one that is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.stages.base import LARGEST, SMALLEST, Metric
from rollstream.stages.loss.correction import MAX_LOG_RATIO


@torch.no_grad()
def mismatch(log_ratio: Tensor, weights: Tensor, cut: Tensor, mask: Tensor) -> tuple[dict[str, Metric], float]:
    """Metrics over the tokens with mask true, and the sum of the squares of their weights.

    All inputs are [T]: `log_ratio` is log r = prox - behave, `weights` and `cut` are what `correction_weights` gives.

        rollout/logprob_diff               |log r|
        rollout/mismatch_kl                -log r, the k1 estimate of KL(behave || prox)
        rollout/mismatch_k3                r - 1 - log r, the k3 estimate of it: never negative, and less noisy
        rollout/ratio_max, _min            largest and smallest r
        rollout/weight                     the weight; r where there is no correction
        rollout/weight_cut                 share of tokens whose weight was truncated or rejected

    With the sum of squares comes the effective sample size, (sum w)^2 / sum w^2 (Kish 1965): it is taken from the sums
    of all ranks. r is held within exp(+-20). A batch without a token has the largest r 0 and the smallest infinity.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = clamped.exp()
    means = {
        "logprob_diff": log_ratio.abs(),
        "mismatch_kl": -log_ratio,
        "mismatch_k3": torch.expm1(clamped) - clamped,
        "weight": weights,
        "weight_cut": cut,
    }
    sums = [torch.where(mask, values, 0.0).double().sum() for values in (*means.values(), weights.double().square())]
    ends = [torch.where(mask, ratio, 0.0).max().double(), torch.where(mask, ratio, torch.inf).min().double()]
    *totals, squares, largest, smallest, count = torch.stack([*sums, *ends, mask.double().sum()]).tolist()
    metrics = {f"rollout/{name}": (total, count) for name, total in zip(means, totals, strict=True)}
    metrics |= {"rollout/ratio_max": (largest, LARGEST), "rollout/ratio_min": (smallest, SMALLEST)}
    return metrics, squares
