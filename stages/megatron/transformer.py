"""Megatron's settings and layer parts for a model of ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.layers import PackedAttention, RMSNorm
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.mcore import (
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
)
from rollstream.stages.megatron.moe import spec_with_experts
from rollstream.stages.megatron.settings import MegatronConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def transformer_config(config: HFConfig, settings: MegatronConfig) -> TransformerConfig:
    """Megatron's settings of the whole model. Raises ValueError where Megatron refuses one."""
    dtype = TORCH_DTYPES[settings.dtype]
    values: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_eps,
        "qk_layernorm": config.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # The random start is overwritten, but building it marks which parameters are split between ranks: without
        # the marks gradient norms are wrong.
        "perform_initialization": True,
        # Torch's compiler fuses the gated unit; experts come in too many sizes for it. Megatron's other fused kernels
        # need packages that we do without.
        "bias_activation_fusion": torch.cuda.is_available() and config.experts is None,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # The loss that we hand over is divided by the denominators of the whole step already.
        "calculate_per_token_loss": False,
        # Dense models are asked for it too, where packs of different lengths go through a pipeline.
        "moe_token_dispatcher_type": "alltoall",
    }
    values |= _layout_values(settings.layout)
    if config.experts is not None:
        values |= {
            "num_moe_experts": config.experts.num,
            "moe_router_topk": config.experts.top_k,
            "moe_ffn_hidden_size": config.experts.ffn_size,
            "moe_router_pre_softmax": not config.experts.normalised,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": settings.moe.dispatcher,
            "moe_grouped_gemm": False,
        }
    return TransformerConfig(**(values | dict(settings.transformer_fields())))


def _layout_values(layout: Layout) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "num_layers_in_first_pipeline_stage": layout.first_layers,
        "num_layers_in_last_pipeline_stage": layout.last_layers,
        "variable_seq_lengths": layout.pp > 1,
    }
    if layout.vpp > 1:
        # With two pipeline ranks, Megatron's batched sends between chunks are matched in the wrong order: lengths that
        # vary crash it, and equal ones give wrong gradients without an error.
        values |= {
            "virtual_pipeline_model_parallel_size": layout.vpp,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return values


def block_spec(config: HFConfig, transformer: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk, with our normalisation, attention and mixture of experts in them."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.experts.num if config.experts else None,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=config.qk_norm,
        normalization="RMSNorm",
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.experts is not None:
        spec_with_experts(layer)
    num_layers = get_num_layers_to_build(transformer, vp_stage=vp_stage)
    final_norm: Any = RMSNorm  # the annotation wants an instance, the code makes one
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=final_norm)
