"""Rotary position embedding (Su et al. 2021): queries and keys are turned by angles that grow with their position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.fused import fused_on_gpu
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.mcore import PackedSeqParams


@dataclass
class Pack(PackedSeqParams):
    """Where the sequences of a pack begin, and how its positions turn queries and keys."""

    #: Cosines and sines, [T, size] each, set by the model that the pack goes through.
    rotary: tuple[Tensor, Tensor] | None = None


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Of the angles of `positions` [T], float32 [T, 2 * number of frequencies]: both halves are the same."""
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


@fused_on_gpu
def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both [T, heads, size], turned: entry i of a head is paired with entry i + size / 2."""
    cos, sin = cos[:, None].to(query.dtype), sin[:, None].to(query.dtype)
    return query * cos + _half_turned(query) * sin, key * cos + _half_turned(key) * sin


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def frequencies_of(config: HFConfig) -> Tensor:
    """Angle for each position of each pair, float32 [size / 2] on this rank's device. Those of scaled embeddings are
    computed by transformers from the folder's settings; raises ValueError for one whose attention needs a factor."""
    if config.rope_type == "default":
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        return (1.0 / config.rope_theta**exponents).to(cpu_platform.device())
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = AutoConfig.from_pretrained(config.folder)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[config.rope_type](settings, torch.device("cpu"))
    if attention_factor != 1.0:
        raise ValueError(f"rope type {config.rope_type!r} with attention factor {attention_factor} is not supported")
    return frequencies.to(cpu_platform.device())
