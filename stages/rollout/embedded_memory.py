"""Memory of generation with transformers, from config.json and the stage's settings. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.stages.megatron import hf_config
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.memory import BYTES, num_parameters
from rollstream.stages.memory import Memory

if TYPE_CHECKING:
    from rollstream.stages.rollout.stage import Rollout


def embedded_memory(config: Rollout.Config, num_groups: int) -> Memory | None:
    """Weights, and keys and values of `num_groups` groups' responses, all of it freed by a rest; None for a model that
    is not known here."""
    try:
        model = hf_config.read(Path(config.model))
    except ValueError:
        return None
    size = BYTES[config.dtype]
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_size * size
    tokens = num_groups * config.n * config.max_tokens
    return Memory(
        parts={"weights": num_parameters(model, Layout()) * size, "kv_cache": tokens * token_bytes},
        freed={"weights", "kv_cache"},
    )
