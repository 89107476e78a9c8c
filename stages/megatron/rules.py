"""How each Megatron parameter is made of Hugging Face tensors, and how ranks share it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollstream.stages.megatron.hf_config import HFConfig


@dataclass(frozen=True)
class Rule:
    """`names` are the Hugging Face tensors, `kind` is how a rank's part is made of them:

    columns   its slice of the second axis
    copy      the whole
    gate_up   its rows of gate, then its rows of up
    qkv       for each of its key/value heads: the query heads that use it, then key, then value
    vocab     its rows of the padded vocabulary; padding is zero and never leaves
    """

    kind: str
    names: tuple[str, ...]


_QKV = tuple(f"self_attn.{x}_proj" for x in ("q", "k", "v"))

#: Parameters of a layer, Megatron's module to Hugging Face modules.
LAYER_RULES: Mapping[str, Rule] = {
    "input_layernorm": Rule("copy", ("input_layernorm",)),
    "self_attention.linear_qkv": Rule("qkv", _QKV),
    "self_attention.q_layernorm": Rule("copy", ("self_attn.q_norm",)),
    "self_attention.k_layernorm": Rule("copy", ("self_attn.k_norm",)),
    "self_attention.linear_proj": Rule("columns", ("self_attn.o_proj",)),
    "pre_mlp_layernorm": Rule("copy", ("post_attention_layernorm",)),
    "mlp.linear_fc1": Rule("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": Rule("columns", ("mlp.down_proj",)),
}

#: Parts of a mixture of experts, by architecture: router, and gate, up and down of expert N.
EXPERT_NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "MixtralForCausalLM": (
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    "Qwen3MoeForCausalLM": (
        "mlp.gate",
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    ),
}

#: Parameters outside the layers.
MODEL_RULES: Mapping[str, Rule] = {
    "embedding.word_embeddings.weight": Rule("vocab", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": Rule("copy", ("model.norm.weight",)),
    "output_layer.weight": Rule("vocab", ("lm_head.weight",)),
}

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])")


def rule_of(parameter: str, config: HFConfig) -> Rule:
    """The rule of a parameter by its Megatron name, in which layers and experts are those of the whole model.

    >>> rule_of("decoder.layers.3.mlp.linear_fc2.weight", config)
    Rule(kind='columns', names=('model.layers.3.mlp.down_proj.weight',))
    """
    if parameter == "output_layer.weight" and config.tied:  # a copy, where the last pipeline rank has no embedding
        return MODEL_RULES["embedding.word_embeddings.weight"]
    if parameter in MODEL_RULES:
        return MODEL_RULES[parameter]
    _, _, layer, module = parameter.split(".", 3)
    module, leaf = module.rsplit(".", 1)
    rule = _module_rule(module, config)
    return Rule(rule.kind, tuple(f"model.layers.{layer}.{name}.{leaf}" for name in rule.names))


def _module_rule(module: str, config: HFConfig) -> Rule:
    if config.experts is None or not module.startswith("mlp."):
        return LAYER_RULES[module]
    router, gate, up, down = EXPERT_NAMES[config.architecture]
    if module == "mlp.router":
        return Rule("copy", (router,))
    match = _EXPERT.fullmatch(module)
    assert match is not None, f"{module} is no part of a mixture of experts"
    index, linear = match.groups()
    if linear == "linear_fc1":
        return Rule("gate_up", (gate.format(index), up.format(index)))
    return Rule("columns", (down.format(index),))


def is_expert(parameter: str) -> bool:
    """Whether a parameter belongs to one expert: it is cut by the experts' own tensor-parallel size."""
    return ".local_experts." in parameter


def local_range(kind: str, size: int, tp: int, rank: int, padded: int) -> tuple[int, int]:
    """Start and end of a rank's slice of an axis of `size` entries (`padded` with the vocabulary's padding)."""
    if kind == "copy":
        return 0, size
    part = (padded if kind == "vocab" else size) // tp
    return min(part * rank, size), min(part * (rank + 1), size)


def join(kind: str, pieces: list[Tensor], config: HFConfig, num_rows: int) -> Tensor:
    """A rank's parameter from its slices of the Hugging Face tensors; `num_rows` is the parameter's first axis."""
    if kind == "qkv":
        heads = [piece.unflatten(0, (-1, size)) for piece, size in zip(pieces, _qkv_sizes(config), strict=True)]
        return torch.cat(heads, 1).flatten(0, 1)
    if kind == "gate_up":
        return torch.cat(pieces)
    (piece,) = pieces
    if kind == "vocab":
        return F.pad(piece, (0, 0, 0, num_rows - piece.shape[0]))
    return piece


def split(kind: str, parts: list[Tensor], config: HFConfig) -> list[Tensor]:
    """The Hugging Face tensors from the parts of all ranks: the inverse of `join`."""
    if kind == "copy":
        return parts[:1]
    if kind == "columns":
        return [torch.cat(parts, 1)]
    if kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    whole = torch.cat(parts)
    if kind == "vocab":
        return [whole[: config.vocab_size]]
    sizes = _qkv_sizes(config)
    return [piece.flatten(0, 1) for piece in whole.unflatten(0, (-1, sum(sizes))).split(sizes, 1)]


def hf_shapes(config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model in Hugging Face form."""
    hidden, ffn, query = config.hidden_size, config.ffn_size, config.num_heads * config.head_size
    keys = config.num_kv_heads * config.head_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    layer |= _expert_shapes(config) if config.experts else _ffn_shapes(*_DENSE_FFN, hidden, ffn)
    if config.qkv_bias:
        layer |= {f"{name}.bias": (size,) for name, size in zip(_QKV, (query, keys, keys), strict=True)}
    if config.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (config.head_size,) for x in ("q", "k")}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


_DENSE_FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _ffn_shapes(gate: str, up: str, down: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {f"{gate}.weight": (ffn, hidden), f"{up}.weight": (ffn, hidden), f"{down}.weight": (hidden, ffn)}


def _expert_shapes(config: HFConfig) -> dict[str, tuple[int, ...]]:
    assert config.experts is not None
    router, *parts = EXPERT_NAMES[config.architecture]
    shapes: dict[str, tuple[int, ...]] = {f"{router}.weight": (config.experts.num, config.hidden_size)}
    for index in range(config.experts.num):
        gate, up, down = (part.format(index) for part in parts)
        shapes |= _ffn_shapes(gate, up, down, config.hidden_size, config.experts.ffn_size)
    return shapes


def _qkv_sizes(config: HFConfig) -> list[int]:
    """Rows of query, key and value that belong to one key/value head."""
    return [config.num_heads // config.num_kv_heads * config.head_size, config.head_size, config.head_size]
