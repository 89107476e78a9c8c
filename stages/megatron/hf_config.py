"""What a model folder's config.json says, in the terms that the Megatron model is built from. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is particular to an architecture."""

    #: Query, key and value have biases, whatever config.json says of it.
    qkv_bias: bool = False
    #: Query and key heads are normalised.
    qk_norm: bool = False
    #: Its feed-forward layers are mixtures of experts.
    moe: bool = False


#: Architectures with a table of weights. Their weights carry the names in `rules`; another is added in both.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "MixtralForCausalLM": Architecture(moe=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, moe=True),
}

#: Rotary position embeddings whose frequencies do not depend on the length of the input and need no further factor.
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Shape of the mixtures of experts, one in each layer."""

    num: int
    #: Experts that a token goes to.
    top_k: int
    #: Feed-forward size of one expert.
    ffn_size: int
    #: The weights of a token's experts add up to 1.
    normalised: bool


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """Shape of a model. `read` makes one."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    rope_type: str
    rope_theta: float
    max_positions: int
    #: The output layer uses the embedding's weight.
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    #: Standard deviation of weights that begin at random.
    init_std: float
    #: Tokens that attention looks back; a longer sequence is not supported. None where it sees all.
    window: int | None
    #: None for a dense model.
    experts: Experts | None


def load_json(folder: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ValueError that says what is missing."""
    if not folder.is_dir():
        raise ValueError(f"model {str(folder)!r} is not a folder; give a local folder in Hugging Face format")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model folder {str(folder)!r} has no config.json; it must be in Hugging Face format")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return cast(dict[str, Any], values)


def read(folder: Path) -> HFConfig:
    """Reads config.json. Raises ValueError listing everything in it that is missing or not supported."""
    values = load_json(folder)
    faults = _faults(values)
    if faults:
        raise ValueError(f"model {str(folder)!r}: " + "; ".join(faults))
    architecture = values["architectures"][0]
    rope = _rope(values)
    heads = int(values["num_attention_heads"])
    return HFConfig(
        folder=folder,
        architecture=architecture,
        num_layers=int(values["num_hidden_layers"]),
        hidden_size=int(values["hidden_size"]),
        ffn_size=int(values["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_size=int(values.get("head_dim") or values["hidden_size"] // heads),
        vocab_size=int(values["vocab_size"]),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope_type=_rope_type(rope),
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
        max_positions=int(values.get("max_position_embeddings", 2048)),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=ARCHITECTURES[architecture].qkv_bias,
        qk_norm=ARCHITECTURES[architecture].qk_norm,
        init_std=float(values.get("initializer_range", 0.02)),
        window=_window(values),
        experts=_experts(values) if ARCHITECTURES[architecture].moe else None,
    )


def _window(values: dict[str, Any]) -> int | None:
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    return int(window) if window and int(window) < int(values.get("max_position_embeddings", 2048)) else None


def _num_experts(values: dict[str, Any]) -> int | None:
    """Under either of its names."""
    return values.get("num_experts") or values.get("num_local_experts")


def _experts(values: dict[str, Any]) -> Experts:
    return Experts(
        num=int(_num_experts(values) or 0),
        top_k=int(values["num_experts_per_tok"]),
        ffn_size=int(values.get("moe_intermediate_size") or values["intermediate_size"]),
        normalised=bool(values.get("norm_topk_prob", values["architectures"][0] == "MixtralForCausalLM")),
    )


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under their present name or their older one."""
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _faults(values: dict[str, Any]) -> list[str]:
    names: list[str] = values.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        return [
            f"architecture {names[0]} has no table of weights; known: {', '.join(ARCHITECTURES)} "
            "(a table is added in rollstream/stages/megatron, in ARCHITECTURES of hf_config.py and in rules.py)"
        ]
    faults: list[str] = []
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    faults += [f"config.json lacks {name}" for name in needed if name not in values]
    if ARCHITECTURES[names[0]].moe:
        faults += _expert_faults(values)
    if (kind := _rope_type(_rope(values))) not in ROPE_TYPES:
        faults.append(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        faults.append(f"hidden_act must be 'silu', got {activation!r}")
    unsupported = ("mlp_bias", "use_sliding_window", "quantization_config")
    if not ARCHITECTURES[names[0]].qkv_bias:
        unsupported = ("attention_bias", *unsupported)
    faults += [f"{name}={values[name]!r} is not supported" for name in unsupported if values.get(name)]
    return faults


def _expert_faults(values: dict[str, Any]) -> list[str]:
    faults = [] if _num_experts(values) else ["config.json lacks num_experts (or num_local_experts)"]
    if "num_experts_per_tok" not in values:
        faults.append("config.json lacks num_experts_per_tok")
    if values.get("mlp_only_layers"):
        faults.append(f"mlp_only_layers={values['mlp_only_layers']!r} is not supported: every layer must have experts")
    if (step := values.get("decoder_sparse_step", 1)) != 1:
        faults.append(f"decoder_sparse_step must be 1, got {step!r}: every layer must have experts")
    return faults


def has_weights(folder: Path) -> bool:
    """Whether the folder has safetensors: one file, or many with an index."""
    return (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file()
