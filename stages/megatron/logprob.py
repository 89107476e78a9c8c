"""Log-probabilities of tokens from logits whose vocabulary is split between tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from rollstream.stages.megatron.fused import fused_on_gpu
from rollstream.stages.megatron.mcore import state


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `labels`, and the entropy of that distribution; float32 [R] each.

    `logits` [R, V / tp] is this rank's part of the padded vocabulary, `labels` [R]; collective over the model's ranks.
    The computation is in float32 whatever the dtype of the logits. Entries from `vocab_size` on are padding: they get
    probability 0 and gradient 0. The entropy (nats) carries no gradient. Two all-reduces of [R] vectors.
    """
    start = logits.shape[-1] * state.get_tensor_model_parallel_rank()
    group = state.get_tensor_model_parallel_group()
    return _TokenLogprobs.apply(logits, labels, temperature, start, vocab_size, group)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logits = (onehot(label) - softmax) / temperature: each rank needs only its own part of both.

    Passes over the logits are what this costs: on a CPU they are in place where they can be. Kept for the backward pass
    are the logits as they came: no copy of them in float32 exists on a GPU at any time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, start: int, vocab_size: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        real = logits[:, : min(max(vocab_size - start, 0), width)]
        if real.shape[-1]:
            peak = _peak(real, temperature)
        else:
            peak = torch.full_like(labels, float("-inf"), dtype=torch.float32)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)

        local = labels - start
        own = (local >= 0) & (local < width)
        index = local.clamp(0, width - 1)[:, None]
        at_label = torch.where(own, logits.gather(-1, index)[:, 0].float() / temperature - peak, 0.0)
        sums = torch.stack([*_sums(real, peak, temperature), at_label])
        dist.all_reduce(sums, group=group)

        total, product, at_label = sums
        log_total = total.log()
        logprob, entropy = at_label - log_total, log_total - product / total
        ctx.save_for_backward(logits, peak + log_total, logprob, own, index)
        ctx.temperature, ctx.num_real = temperature, real.shape[-1]
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_total, logprob, own, index = ctx.saved_tensors
        grad = grads[0] / ctx.temperature
        out = _gradient(logits[:, : ctx.num_real], log_total, -grad, ctx.temperature)
        if num_padding := logits.shape[-1] - ctx.num_real:
            out = F.pad(out, (0, num_padding))
        at_label = torch.where(own, -torch.expm1(logprob) * grad, out.gather(-1, index)[:, 0])
        out.scatter_(-1, index, at_label[:, None].to(out.dtype))
        return out, None, None, None, None, None


@fused_on_gpu
def _peak(logits: Tensor, temperature: float) -> Tensor:
    return logits.amax(-1).float() / temperature


@fused_on_gpu
def _sums(logits: Tensor, peak: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Over the vocabulary: of e^x, and of x * e^x, where x is what a logit lies below the peak."""
    below = (logits.float() / temperature).sub_(peak[:, None])
    exponential = below.exp()
    total = exponential.sum(-1)
    return total, exponential.mul_(below).sum(-1)


@fused_on_gpu
def _gradient(logits: Tensor, log_total: Tensor, factor: Tensor, temperature: float) -> Tensor:
    """Softmax times `factor` [R], in the dtype of the logits."""
    probability = (logits.float() / temperature).sub_(log_total[:, None]).exp_()
    return probability.mul_(factor[:, None]).to(logits.dtype)
