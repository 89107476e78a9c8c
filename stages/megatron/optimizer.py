"""Megatron's distributed Adam and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollstream.stages.megatron.mcore import (
    DistributedDataParallel,
    DistributedOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate

#: Of float16. It falls when gradients overflow and rises when they have not for long.
INITIAL_LOSS_SCALE = 2.0**16


class TorchAdamOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with torch's Adam inside, which counts steps in each parameter's state."""

    def start_from_zero(self) -> None:
        """Gives Adam its state before the first step, so that it can be saved and loaded at any time."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def build_optimizer(chunks: Sequence[DistributedDataParallel], settings: ActorUpdate.Config) -> Any:
    """Adam whose state and float32 weights are split over the data-parallel ranks; collective.

    Gradients are clipped to the global norm `clip_grad`; 0 switches that off. Weight decay is decoupled (AdamW) and
    spares biases and norms.
    """
    dtype: torch.dtype = chunks[0].config.params_dtype
    adam = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=INITIAL_LOSS_SCALE,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(adam, list(chunks))
    whole = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in whole:
        part.grad_scaler = whole[0].grad_scaler  # the loss has one scale
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            part.__class__ = TorchAdamOptimizer  # Megatron's factory takes no class
            part.start_from_zero()
        else:
            part._init_optimizer_states_with_dummy_values()  # a checkpoint is loaded into what is there
    return optimizer


def parts_of(optimizer: Any) -> list[Any]:
    """Megatron has an optimizer for experts and one for the rest, where there are both. One that has nothing to train
    is left out."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def prepare_gradients(optimizer: Any) -> bool:
    """Takes the gradients in, without their loss scale, and says whether one is not finite: then the scale falls, on
    all ranks and for all parts alike; collective."""
    parts = parts_of(optimizer)
    if parts[0].grad_scaler is None:
        return bool(optimizer.prepare_grads())
    for part in parts:
        part._copy_model_grads_to_main_grads()
    found_inf = any([part._unscale_main_grads_and_check_for_nan() for part in parts])
    parts[0].grad_scaler.update(found_inf)
    return found_inf


def apply_gradients(optimizer: Any, norm: float) -> None:
    """Clips prepared gradients, whose global norm is `norm`, and changes the weights by them; collective."""
    for part in parts_of(optimizer):
        parameters = part.get_parameters()
        if part.config.clip_grad > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()


def build_scheduler(optimizer: Any, settings: ActorUpdate.Config) -> OptimizerParamScheduler:
    """Step k of the warm-up, counted from 1, has lr * k / (warmup_steps + 1): no step is wasted on a rate of 0.

    Then the rate stays ("constant"), or falls to `min_lr` ("linear", "cosine") at step `decay_steps`, counted from the
    run's first. Steps are optimizer steps that were made; a skipped one does not count.
    """
    warmup_steps = settings.warmup_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr / (warmup_steps + 1),
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(settings.decay_steps, warmup_steps + 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
