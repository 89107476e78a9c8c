"""Megatron's GPTModel as this project uses it: packed sequences in, logits of the wanted positions out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.batch import MicroBatch
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.layers import PackedAttention, RMSNorm
from rollstream.stages.megatron.mcore import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    state,
)

#: The vocabulary is padded to a multiple of this: the same size for every usual tensor-parallel size, so that
#: checkpoints of different layouts have tensors of one shape.
VOCAB_MULTIPLE = 128


class Model(GPTModel):
    """GPTModel whose forward takes a MicroBatch and gives logits [R, V / tp] of the R positions in `batch.rows`.

    The output layer sees only those rows: of a prompt no logits are ever made, which saves most of the memory of a
    forward pass where the vocabulary is large.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rows: Tensor | None = None
        self.output_layer.register_forward_pre_hook(self._keep_rows)

    def forward(self, batch: MicroBatch) -> Tensor:  # type: ignore[override]
        self._rows = batch.rows
        no_mask: Any = None  # packed attention is causal by itself
        logits = super().forward(batch.input_ids, batch.position_ids, no_mask, packed_seq_params=batch.packed)
        self._rows = None
        return logits[0]

    def _keep_rows(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args  # hidden [T, 1, H]
        return (hidden.index_select(0, self._rows), *rest)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Vocabulary of the padded model: a multiple of `VOCAB_MULTIPLE`, and of `tp`."""
    multiple = VOCAB_MULTIPLE if VOCAB_MULTIPLE % tp == 0 else VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def build(config: HFConfig, dtype: torch.dtype) -> Model:
    """A model of that shape on this rank's device, its weights still random; collective.

    Raises ValueError for a rotary embedding whose attention needs a further factor.
    """
    tp = state.get_tensor_model_parallel_world_size()
    transformer = _transformer_config(config, tp, dtype)
    model = Model(
        transformer,
        _block_spec(config),
        vocab_size=padded_vocab_size(config.vocab_size, tp),
        max_sequence_length=config.max_positions,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        share_embeddings_and_output_weights=config.tied,
    )
    if config.rope_type != "default":
        model.rotary_pos_emb.inv_freq = _scaled_frequencies(config)
    return model.to(cpu_platform.device())


def _transformer_config(config: HFConfig, tp: int, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The random start is overwritten, but building it marks which parameters are split between ranks: without
        # the marks gradient norms are wrong.
        perform_initialization=True,
        # Fused kernels need packages that we do without.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # The loss that we hand over is divided by the denominators of the whole step already.
        calculate_per_token_loss=False,
    )


def _block_spec(config: HFConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    final_norm: Any = RMSNorm  # the annotation wants an instance, the code makes one
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=final_norm)


def _scaled_frequencies(config: HFConfig) -> Tensor:
    """Inverse frequencies of a scaled rotary embedding, as transformers computes them from the folder's settings."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = AutoConfig.from_pretrained(config.folder)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[config.rope_type](settings, torch.device("cpu"))
    if attention_factor != 1.0:
        raise ValueError(f"rope type {config.rope_type!r} with attention factor {attention_factor} is not supported")
    return frequencies.to(cpu_platform.device())
