"""Clipped surrogate policy loss of PPO, with the dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.stages.base import Metric

#: |log-ratio| above which it is clamped: exp(20) is 5e8, far outside every clip range, and safe in float32.
MAX_LOG_RATIO = 20.0


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Loss of each token, [T], and metrics as (sum, count) over the tokens with mask true.

    With r = exp(logprobs - old_logprobs) and A the advantage:

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          Schulman et al. 2017, equation 7
        L = min(L, -A dual_clip)  where A < 0                           Ye et al. 2020, equation 5

    All inputs are flat, [T]; `mask` is bool. Masked tokens have loss 0 and gradient 0 whatever their other inputs hold,
    infinities and NaN included: the log-ratio is masked before `exp`, since 0 * NaN would be NaN. `dual_clip` is above
    1, or None for no bound. The gradient is 0 where the log-ratio is clamped to +-20.

    Metrics: `actor/ratio` r; `actor/clip_fraction` tokens where the clipped term is the larger; `actor/
    clip_fraction_lower` tokens held by the dual clip; `actor/kl` old - new, the k1 estimate of KL(old || new).

    >>> loss, _ = ppo_clip(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([True]),
    ...                    clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    >>> round(loss.item(), 4)       # r = 1.65 is cut to 1.28
    -1.28
    """
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(mask, logprobs - old_logprobs, zero)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantage = torch.where(mask, advantages.to(logprobs.dtype), zero)

    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    held = torch.zeros_like(mask)
    if dual_clip is not None:
        bound = -advantage * dual_clip
        held = (advantage < 0) & (loss > bound)
        loss = torch.where(held, bound, loss)

    return loss, _metrics(
        mask, {"ratio": ratio, "clip_fraction": clipped > plain, "clip_fraction_lower": held, "kl": -log_ratio}
    )


@torch.no_grad()
def _metrics(mask: Tensor, per_token: dict[str, Tensor]) -> dict[str, Metric]:
    """Sums over the tokens with mask true, brought to the host in one transfer."""
    rows = torch.stack([*(values.double() for values in per_token.values()), torch.ones_like(mask).double()])
    *totals, num_tokens = (rows * mask).sum(dim=1).tolist()
    return {f"actor/{name}": (total, num_tokens) for name, total in zip(per_token, totals, strict=True)}
