"""The two parts of a transformer layer that are ours: normalisation and attention, both without extra packages."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollstream.stages.megatron.fused import fused_on_gpu
from rollstream.stages.megatron.mcore import PackedSeqParams, TransformerConfig
from rollstream.stages.megatron.rotary import rotated


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
        return _normalised(x, self.weight, self.eps)


@fused_on_gpu
def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a pack: query [T, heads, size], out [T, heads * size]. Both are
    turned by their positions first.

    key and value [T, key/value heads, size] may have fewer heads: one for each group of adjacent query heads. Nothing
    of one sequence enters the arithmetic of another, not even as a zero weight, so that no value of a sequence changes
    its neighbours' results.

    Where the sequences begin is read on the host: from `cu_seqlens_q_padded` if it is there, else `cu_seqlens_q`, which
    may then lie on the device for the kernel. A pack has no padding within it, so both say the same.
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
        packed: Any = packed_seq_params
        query, key = rotated(query, key, *packed.rotary)
        if query.is_cuda and fits_varlen(query, torch.cuda.get_device_capability(query.device)):
            bounds = packed.cu_seqlens_q.to(query.device, non_blocking=True)
            return attend_at_once(query, key, value, bounds, packed.max_seqlen_q, self.scale)
        starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        return attend_by_runs(query, key, value, starts.diff().tolist(), self.scale)


def attend_by_runs(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """One call of torch's attention for each run of adjacent sequences of one length, without a copy.

    A micro-batch has its samples by falling length, so that all of one length are a run. Each sequence's result is bit
    for bit that of a call of its own.
    """
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    sizes = [length * count for length, count in runs]
    if query.is_cuda:  # of torch's kernels for float32, the one that keeps no [length, length] needs equal heads
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    outs: list[Tensor] = []
    for (length, count), *parts in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


def fits_varlen(query: Tensor, capability: tuple[int, int]) -> bool:
    """Whether torch's kernel for packs takes such queries on a device of this compute capability: half precision, and
    head sizes up to 256 in steps of 8. Others go by runs."""
    size = query.shape[-1]
    return query.dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256 and capability >= (8, 0)


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, max_length: int, scale: float | None
) -> Tensor:
    """One kernel for the whole pack; `bounds` int32 [sequences + 1] on the device, where each sequence begins."""
    varlen_attn, names_groups = _varlen()
    options: dict[str, Any] = {"enable_gqa": True} if names_groups else {}
    causal = (-1, 0)  # all keys before a query, none behind it
    out = varlen_attn(
        query, key, value, bounds, bounds, max_length, max_length, scale=scale, window_size=causal, **options
    )
    return out.flatten(1)


@functools.cache
def _varlen() -> tuple[Any, bool]:
    """torch's attention for packs, and whether it wants to be told of fewer key/value heads than query heads; torch
    2.11 takes them as they come. Its module loads torch's compiler: only where it is used."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[T, groups, size] -> [T, num_heads, size]: each head once for every query head of its group."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
