"""The two parts of a transformer layer that are ours: normalisation and attention, both without extra packages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollstream.stages.megatron.mcore import PackedSeqParams, TransformerConfig


class RMSNorm(torch.nn.Module):
    """weight * x / rms(x), the last axis normalised in float32 (Zhang and Sennrich 2019, equation 4).

    The product with the weight comes after the cast back, as in transformers, so that bfloat16 models agree too.
    Megatron passes its arguments by keyword; those not named here do not concern it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack: query [T, heads, size], out [T, heads * size].

    One call of torch's attention a sequence: nothing of one sequence enters the arithmetic of another, not even as
    a zero weight, so that a sequence's result does not depend on its neighbours.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params is not None, "sequences always come packed"
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._one(*part) for part in parts]).flatten(1)

    def _one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)
