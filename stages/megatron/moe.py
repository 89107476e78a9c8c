"""The mixture-of-experts layer: Megatron's, with our router, and a dispatch that works without CUDA."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from rollstream.stages.megatron.mcore import MoEAlltoAllTokenDispatcher, MoELayer
from rollstream.stages.megatron.router import Router


class ExpertLayer(MoELayer):
    """Megatron's layer; without CUDA its "alltoall" dispatch is `HostDispatcher`.

    Raises ValueError where the dispatch that the settings ask for can't run on this rank.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        _check_dispatcher(config)
        super().__init__(config, *args, **kwargs)
        if not torch.cuda.is_available() and type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.token_dispatcher.__class__ = HostDispatcher
        # Megatron 0.16 takes experts for dense weights where ep is 1, and would not add up their gradients over the
        # tensor-parallel ranks that hold copies of them.
        own_groups = config.expert_model_parallel_size > 1
        own_groups |= config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        experts: Any = self.experts
        for parameter in experts.parameters():
            parameter.allreduce = not own_groups


class HostDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends tokens with their numbers on the host.

    Megatron brings the numbers of tokens that ranks exchange from CUDA to the host as arrays. Those that are on the
    host it leaves tensors, which collectives refuse.
    """

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        moved = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(self, name)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.numpy())
        return moved


def _check_dispatcher(config: Any) -> None:
    kind, cuda = config.moe_token_dispatcher_type, torch.cuda.is_available()
    if kind == "flex" and not (cuda and importlib.util.find_spec("deep_ep")):
        lacking = "the package deep_ep" if cuda else "CUDA"
        raise ValueError(f"moe dispatcher 'flex' needs {lacking}, which this rank has not: use 'alltoall'")
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    if kind == "alltoall" and not cuda and ep > 1 and etp > 1:
        raise ValueError(
            f"moe dispatcher 'alltoall' needs etp=1 or ep=1 on a rank without CUDA, got ep={ep} and etp={etp}: gloo "
            "gathers parts of one length only"
        )


def spec_with_experts(layer: Any) -> None:
    """Puts our layer and router into the specification of a transformer layer with experts, as
    `get_gpt_layer_local_spec` makes it: an object of Megatron's up to 0.16, a partial call from 0.19 on."""
    parts: Any = layer.submodules
    if isinstance(parts.mlp, functools.partial):
        parts.mlp.keywords["submodules"].router = Router
        parts.mlp = functools.partial(ExpertLayer, *parts.mlp.args, **parts.mlp.keywords)
    else:
        parts.mlp.submodules.router = Router
        parts.mlp.module = ExpertLayer
