"""A policy with gradients and an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstream.stages.megatron import cpu_platform, parallel
from rollstream.stages.megatron.batch import MicroBatch
from rollstream.stages.megatron.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    state,
)
from rollstream.stages.megatron.offload import Offload
from rollstream.stages.megatron.optimizer import apply_gradients, build_optimizer, build_scheduler, prepare_gradients
from rollstream.stages.megatron.policy import Policy, run_schedule
from rollstream.stages.megatron.router_context import pack_context

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate

#: (log-probabilities, entropies, micro-batch) -> this micro-batch's part of the step's loss, and what to report of it.
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Any]]


class Trainer:
    """One optimizer step is `forward_backward`, then `step` or, to keep the weights, nothing."""

    def __init__(self, policy: Policy, settings: ActorUpdate.Config):
        self.policy, self.settings = policy, settings
        reduction = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        config: Any = policy.chunks[0].config
        self.ddp = [DistributedDataParallel(config, reduction, chunk) for chunk in policy.chunks]
        self.optimizer = build_optimizer(self.ddp, settings)
        self.scheduler = build_scheduler(self.optimizer, settings)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.offload = Offload(self, settings.offload)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by in float16, so that small gradients are not lost; else 1."""
        return float(self.optimizer.get_loss_scale())

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Gradients of the sum of `loss` over all micro-batches of all ranks; the reports of this rank's, in order,
        where the model ends.

        Collective: every data-parallel rank must bring the same number of micro-batches. Megatron divides each loss by
        that number and averages gradients over the ranks; the factor here undoes both, so that the sum is a sum.
        """
        factor = len(batches) * state.get_data_parallel_world_size()
        self._tell_routers(batches, factor)

        def scaled(scores: Tensor, batch: MicroBatch) -> tuple[Tensor, Any]:
            value, report = loss(scores[:, 0], scores[:, 1].detach(), batch)
            return value * factor, report

        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return run_schedule(self.ddp, batches, scaled)

    def _tell_routers(self, batches: Sequence[MicroBatch], factor: float) -> None:
        if self.policy.config.experts is None:
            return
        here = torch.tensor(sum(sum(b.sequence_lengths) for b in batches), device=cpu_platform.device())
        num_tokens = int(parallel.sum_over_shares(here))
        for batch in batches:
            batch.router = pack_context(
                batch.sequence_lengths,
                num_filler=batch.num_filler,
                num_step_tokens=max(num_tokens, 1),
                factor=factor,
                settings=self.settings.moe,
            )

    def step(self) -> float:
        """Changes the weights by the gradients at hand and returns their global norm, before clipping; collective.

        Where the norm is not finite nothing is changed, on any rank: weights, Adam's state and the schedule stay; in
        float16 the loss scale falls.
        """
        self.offload.settle()
        found_inf = prepare_gradients(self.optimizer)
        norm = math.inf if found_inf else float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            apply_gradients(self.optimizer, norm)
            self.scheduler.step(1)
        return norm
