"""The router of a mixture of experts: its losses, which do not depend on how a step is cut, and its metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from rollstream.stages.base import Metric
from rollstream.stages.megatron.mcore import TopKRouter, moe_utils, state
from rollstream.stages.megatron.router_context import RouterContext


class Router(TopKRouter):
    """Megatron's router with losses of ours in place of its own, which depend on the cut of a step and count filler.

    For a sequence s of T_s tokens, E experts and k of them for each token (Fedus et al. 2021, equations 4 to 6, for
    one sequence in place of a batch):

        L_s = sum over i of f_i P_i
        f_i = E / (k T_s) * number of tokens of s that went to expert i        (no gradient)
        P_i = mean over the tokens of s of the softmax over all E experts at i

    It is 1 where all experts get the same. With N tokens in the whole step, over all micro-batches and ranks and
    without filler, each layer adds to the loss of the step

        aux_loss_coef * sum over sequences of T_s / N * L_s
        + z_loss_coef * 1 / N * sum over tokens of (logsumexp of the logits)^2         (Zoph et al. 2022, equation 5)

    Sequences are weighted by their tokens: a sequence with fewer than E / k can't be balanced whatever the router does,
    and should not pull like a long one. So each token has weight 1 / N in both terms, each rank adds up the tokens that
    it holds, and the parts of all micro-batches and ranks add up to the loss of the step.

    Sequence parallelism: a rank holds a part of each sequence's tokens. f_i needs those of all: counts are summed
    over the tensor-parallel ranks. P_i is a sum over tokens, so that each rank's part has the right gradient at its own
    logits; Megatron later adds up the gradients of the router's weight over these ranks. Nothing else is summed.

    Scale: Megatron runs the backward pass of this loss with scale / m, where `scale` is the loss scale of float16 (else
    1) and m the micro-batches of a rank; it then averages gradients over d data-parallel ranks, and the optimizer takes
    `scale` out. A loss l attached here adds l / (m d) to what is differentiated, so it is multiplied by m d before:
    the `factor` of the context, which the trainer multiplies its own loss by for the same reason. Experts are
    averaged over d too, however many ranks share them.

    No context, or no gradients, no loss and no metrics.
    """

    #: Of the pack that is going through, forward or backward; `run_with` sets it.
    context: RouterContext | None = None
    num_experts: int
    #: In the whole model, from 1.
    layer_number: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        #: [E + 2] of each pack since `take`: tokens of each expert, the two losses without their weights. A pack that
        #: comes again, to be computed once more, writes the same in the same place.
        self.records: dict[RouterContext, Tensor] = {}

    def gating(self, input: Tensor) -> Tensor:
        """[t, 1, E] logits. Megatron 0.16 can't compute them without Transformer Engine."""
        if hasattr(moe_utils, "te_general_gemm"):
            return super().gating(input)
        assert self.config.moe_router_dtype == "fp32"
        assert self.bias is None
        return F.linear(input.float(), self.weight.float())

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Weights and choice of experts, [t, E] each, for the t tokens that this rank holds."""
        with self._replaying(len(logits)):
            weights, chosen = super().routing(logits, *args, **kwargs)
        context = self.context
        if context is None or not torch.is_grad_enabled():
            return weights, chosen
        settings = context.settings
        with torch.set_grad_enabled(settings.has_losses):
            balance, size = self._losses(logits.view(chosen.shape).float(), chosen, context)
        counts = chosen[self._own(context.sequences) < context.num_sequences].sum(0)
        self.records[context] = torch.cat([counts, torch.stack([balance, size]).detach()]).double()
        if settings.has_losses:
            loss = settings.aux_loss_coef * balance + settings.z_loss_coef * size
            weights = moe_utils.MoEAuxLossAutoScaler.apply(weights, loss * context.factor)
        return weights, chosen

    def _losses(self, logits: Tensor, chosen: Tensor, context: RouterContext) -> tuple[Tensor, Tensor]:
        """The two losses of this rank's tokens, without their coefficients."""
        sequences = self._own(context.sequences)
        counts = logits.new_zeros(len(context.lengths), self.num_experts)
        counts.index_add_(0, sequences, chosen.type_as(counts))
        if self.config.sequence_parallel:
            dist.all_reduce(counts, group=self.tp_group)
        shares = counts * (self.num_experts / (self.topk * context.lengths))[:, None]
        token_weights = (sequences < context.num_sequences) / context.num_step_tokens
        balance = torch.linalg.vecdot(shares[sequences], logits.softmax(-1))
        return (token_weights * balance).sum(), (token_weights * logits.logsumexp(-1).square()).sum()

    def _own(self, per_token: Tensor) -> Tensor:
        """Those entries of [T, ...] that belong to this rank's tokens."""
        if not self.config.sequence_parallel:
            return per_token
        return per_token.chunk(self.tp_group.size())[self.tp_group.rank()]

    @contextlib.contextmanager
    def _replaying(self, num_tokens: int) -> Generator[None]:
        """Within it, Megatron takes the experts of the context's routes in place of the best."""
        if self.context is None or self.context.routes is None:
            yield
            return
        experts = self._own(self.context.routes)[:, self.layer_number - 1]
        assert experts.shape == (num_tokens, self.topk), (experts.shape, num_tokens, self.topk)
        self.router_replay = _Replay(experts)
        try:
            yield
        finally:
            self.router_replay = None

    def take(self) -> Tensor:
        """[E + 2] sums over this rank's tokens of all packs since the last time."""
        records, self.records = self.records, {}
        nothing = torch.zeros(self.num_experts + 2, dtype=torch.float64, device=self.weight.device)
        return sum(records.values(), nothing)


class _Replay:
    """Chooses experts for Megatron's `topk_routing_with_score_function`."""

    def __init__(self, experts: Tensor):
        self.experts = experts

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return scores.gather(1, self.experts), self.experts


def routers_of(chunk: torch.nn.Module) -> list[Router]:
    """In the order of their layers; none for a dense model."""
    return [module for module in chunk.modules() if isinstance(module, Router)]


def run_with(context: RouterContext | None, routers: Sequence[Router], forward: Callable[[], Tensor]) -> Tensor:
    """What `forward`, a forward pass of the routers' chunk, gives; with `context` there then, and in its backward pass.

    The backward pass may run parts of the forward pass again, at a time when other packs have gone through the chunk,
    as they do in a pipeline. It begins at the output, where the context is set again.

        out = run_with(batch.context, routers, lambda: chunk(batch.input_ids, ...))
    """

    def enter(_: Tensor | None = None) -> None:
        for router in routers:
            router.context = context

    enter()
    out = forward()
    if routers and out.requires_grad:
        out.register_hook(enter)
    return out


def take_metrics(chunks: Sequence[torch.nn.Module]) -> dict[str, Metric]:
    """What the routers of this rank's chunks saw in the optimizer step that ends; collective, once a step.

    The metrics of all ranks add up to the step's, each a mean over layers:

        moe/load_max, moe/load_min   share of the step's tokens that the busiest and the idlest expert got, times E:
                                     1 where all get the same
        moe/aux_loss, moe/z_loss     the two losses, without their coefficients

    The ranks that hold the same layers sum up what each has seen, and the first of them reports it.
    """
    routers = [router for chunk in chunks for router in routers_of(chunk)]
    if not routers:
        return {}
    totals = torch.stack([router.take() for router in routers])
    group: Any = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(totals, group=group)
    loads, losses = totals[:, :-2], totals[:, -2:]
    if dist.get_rank(group) != 0 or not loads.any():
        return {}
    loads = loads / loads.mean(-1, keepdim=True)
    sums = torch.stack([loads.amax(-1), loads.amin(-1), *losses.unbind(-1)]).sum(-1).tolist()
    names = ("moe/load_max", "moe/load_min", "moe/aux_loss", "moe/z_loss")
    return {name: (total, float(len(routers))) for name, total in zip(names, sums, strict=True)}
