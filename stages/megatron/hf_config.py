"""What a model folder's config.json says, in the terms that the Megatron model is built from. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

#: Architectures with a table of weights, and what is particular to each: biases on query, key and value; normalised
#: query and key heads. Their weights carry the names in `rules.LAYER_RULES`; another architecture is added in both.
ARCHITECTURES: Mapping[str, Mapping[str, bool]] = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}

#: Rotary position embeddings whose frequencies do not depend on the length of the input and need no further factor.
ROPE_TYPES = ("default", "linear", "llama3")


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
        **ARCHITECTURES[architecture],
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
            "(a table is added in rollstream/stages/megatron, hf_config.py and rules.py)"
        ]
    faults: list[str] = []
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    faults += [f"config.json lacks {name}" for name in needed if name not in values]
    if (kind := _rope_type(_rope(values))) not in ROPE_TYPES:
        faults.append(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        faults.append(f"hidden_act must be 'silu', got {activation!r}")
    unsupported = ("mlp_bias", "use_sliding_window", "quantization_config")
    if names[0] != "Qwen2ForCausalLM":  # whose query, key and value always have a bias, whatever this setting says
        unsupported = ("attention_bias", *unsupported)
    faults += [f"{name}={values[name]!r} is not supported" for name in unsupported if values.get(name)]
    return faults
