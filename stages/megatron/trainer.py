"""A policy with gradients and an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstream.stages.megatron.batch import MicroBatch
from rollstream.stages.megatron.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
    state,
)
from rollstream.stages.megatron.optimizer import build_optimizer, build_scheduler
from rollstream.stages.megatron.policy import Policy

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate

#: (log-probabilities, entropies, micro-batch) -> this micro-batch's part of the step's loss, and what to report of it.
LossFunction = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Any]]


class Trainer:
    """One optimizer step is `forward_backward`, then `step` or, to keep the weights, nothing."""

    def __init__(self, policy: Policy, settings: ActorUpdate.Config):
        self.policy = policy
        reduction = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.ddp = DistributedDataParallel(policy.model.config, reduction, policy.model)
        policy.model.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = build_optimizer(
            self.ddp,
            lr=settings.lr,
            min_lr=settings.min_lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip_grad,
        )
        self.scheduler = build_scheduler(
            self.optimizer,
            lr=settings.lr,
            min_lr=settings.min_lr,
            warmup_steps=settings.warmup_steps,
            decay=settings.decay,
            decay_steps=settings.decay_steps,
            weight_decay=settings.weight_decay,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def forward_backward(self, batches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Gradients of the sum of `loss` over all micro-batches of all ranks; the reports of this rank's, in order.

        Collective: every data-parallel rank must bring the same number of micro-batches. Megatron divides each loss by
        that number and averages gradients over the ranks; the factor here undoes both, so that the sum is a sum.
        """
        factor = len(batches) * state.get_data_parallel_world_size()

        def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch: MicroBatch = next(iterator)

            def scaled(logits: Tensor) -> tuple[Tensor, Tensor, Any]:
                value, report = loss(*self.policy.logprobs(logits, batch), batch)
                return value * factor, torch.ones((), dtype=torch.int, device=value.device), report

            return model(batch), scaled

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            seq_length=1,  # read only where layers are spread over ranks
            micro_batch_size=1,
            forward_only=False,
        )

    def step(self) -> float:
        """Changes the weights by the gradients at hand and returns their global norm, before clipping; collective.

        Where the norm is not finite nothing is changed, on any rank: weights, Adam's state and the schedule stay.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step(1)
        return norm
