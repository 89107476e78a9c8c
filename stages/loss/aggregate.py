"""Weights that turn losses of tokens into the loss of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from rollstream.stages.loss import AGGREGATIONS


def token_weights(
    mask: Tensor, sample_index: Tensor, mode: str, *, num_tokens: int, num_samples: int, max_tokens: int
) -> Tensor:
    """Weight of each token, float32 [T], 0 where `mask` is false: the loss of a step is the sum of w_t L_t.

        token-mean               1 / num_tokens                  every token counts alike
        seq-mean-token-mean      1 / (len_i * num_samples)       every sample counts alike (GRPO, Shao et al. 2024)
        seq-mean-token-sum-norm  1 / (num_samples * max_tokens)  no length bias (Dr. GRPO, Liu et al. 2025)

    `mask` [T] bool and `sample_index` [T] (an integer label of the token's sample) belong to one micro-batch.
    The denominators belong to the whole optimizer step, all data-parallel ranks and micro-batches: then the sum over
    micro-batches does not depend on how the step was cut. `num_tokens` counts tokens with mask true; `num_samples`
    counts all samples, those with no such token too; `max_tokens` is the generation budget, a constant of the run.
    len_i is the sample's own count of tokens with mask true, so a sample must be whole within its micro-batch.

    A step without a single token to train on has all weights 0. Raises ValueError for an unknown mode.

    >>> token_weights(torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1]), "seq-mean-token-mean",
    ...               num_tokens=3, num_samples=2, max_tokens=8)
    tensor([0.2500, 0.2500, 0.0000, 0.5000])
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    counted = mask.to(torch.float32)
    if mode == "token-mean":
        return counted / max(num_tokens, 1)
    if mode == "seq-mean-token-sum-norm":
        return counted / (num_samples * max_tokens)
    _, sample = torch.unique(sample_index, return_inverse=True)
    lengths = torch.zeros_like(counted).index_add_(0, sample, counted)  # unlike bincount, deterministic on CUDA
    return counted / (lengths[sample].clamp(min=1.0) * num_samples)
