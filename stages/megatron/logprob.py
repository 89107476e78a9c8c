"""Log-probabilities of tokens from logits whose vocabulary is split between tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

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
    """d logprob / d logits = (onehot(label) - softmax) / temperature: each rank needs only its own part of both."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, start: int, vocab_size: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(torch.float32, copy=True)  # passes over it are what this costs: they are few, and in place
        if temperature != 1.0:
            scaled.div_(temperature)
        width = scaled.shape[-1]
        real = min(max(vocab_size - start, 0), width)
        scaled[:, real:] = float("-inf")
        peak = scaled.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        scaled.sub_(peak[:, None])

        local = labels - start
        own = (local >= 0) & (local < width)
        index = local.clamp(0, width - 1)[:, None]
        at_label = torch.where(own, scaled.gather(-1, index)[:, 0], 0.0)
        exponential = scaled.exp()
        scaled[:, real:] = 0.0  # 0 * -inf is NaN
        sums = torch.stack([exponential.sum(-1), at_label, torch.linalg.vecdot(exponential, scaled)])
        dist.all_reduce(sums, group=group)

        total, at_label, product = sums
        log_total = total.log()
        entropy = log_total - product / total
        ctx.save_for_backward(exponential.div_(total[:, None]), own, index)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return at_label - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probability, own, index = ctx.saved_tensors
        grad = grads[0]
        out = probability * (grad / -ctx.temperature)[:, None]
        out.scatter_add_(-1, index, (torch.where(own, grad, 0.0) / ctx.temperature)[:, None])
        return out.to(ctx.dtype), None, None, None, None, None
