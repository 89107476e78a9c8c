"""A Megatron linear with low-rank adapters beside its frozen weight.

Megatron fuses Hugging Face modules into one linear: query, key and value; gate and up. Each module keeps an (A, B) of
its own, [rank, in] and [out, rank], so that adapters of any choice of modules go to and from PEFT exactly. B is split
between ranks by rows where the linear is column-parallel, A by columns where it is row-parallel; the other of the two
is whole on every rank. Between ranks travels the low-rank vector, once for all modules of a linear:

    column-parallel      x [T, in]      -> A -> low, gradients summed over ranks  -> own rows of B -> y [T, out / tp]
      sequence-parallel  x [T / tp, in] -> A -> low, gathered over the sequence   -> own rows of B -> y [T, out / tp]
    row-parallel         x [T, in / tp] -> own columns of A -> low, summed over ranks  -> B -> y [T, out]
      sequence-parallel  x [T, in / tp] -> own columns of A -> low, reduce-scattered   -> B -> y [T / tp, out]

Experts leave the traffic of tokens to Megatron's dispatcher, which sums over their ranks what they put out and the
gradients of what they take in. So only the gradient of the whole one of A and B is summed here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.mcore import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    make_sharded_tensors_for_checkpoint,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    state,
)

Linear = ColumnParallelLinear | RowParallelLinear


class Pair(torch.nn.Module):
    """A and B of one Hugging Face module, this rank's part of each; both zero at first.

    `group` are the ranks that share the linear, `axis` is the axis of B (0) or A (1) that is split between them.
    """

    def __init__(self, hf_module: str, linear: Linear, rank: int, num_rows: int):
        super().__init__()
        self.hf_module = hf_module
        self.group: Any = linear.tp_group
        self.axis = 0 if isinstance(linear, ColumnParallelLinear) else 1
        self._is_expert: bool = linear.is_expert
        weight: Any = linear.weight
        self.a = torch.nn.Parameter(weight.new_zeros(rank, weight.shape[1]))
        self.b = torch.nn.Parameter(weight.new_zeros(num_rows, rank))
        self._mark(linear)

    def _mark(self, linear: Linear) -> None:
        """Tells Megatron how the ranks share the two: its gradient sums, norms and buffers go by these marks."""
        split, whole = self.split_and_whole
        for parameter in (self.a, self.b):
            _set(parameter, partition_dim=-1, partition_stride=1, allreduce=not linear.is_expert)
        _set(split, tensor_model_parallel=True, partition_dim=self.axis)
        # A rank sees only its part of the sequence: Megatron sums such gradients over the ranks.
        _set(whole, sequence_parallel=linear.sequence_parallel and not linear.is_expert)
        # In the norm, the copies of one tensor count once. For experts Megatron can't tell which ranks have copies.
        first_expert_copy = linear.is_expert and self.group.rank() == 0
        _set(whole, tensor_model_parallel=first_expert_copy, shared=linear.is_expert and not first_expert_copy)

    @property
    def split_and_whole(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        return (self.b, self.a) if self.axis == 0 else (self.a, self.b)

    @property
    def is_first_copy(self) -> bool:
        """Whether of the ranks that hold the same part of the pair, by data parallelism, this is the first."""
        if self._is_expert:
            return state.get_expert_data_parallel_rank() == 0
        return state.get_data_parallel_rank() == 0

    @torch.no_grad()
    def fill(self, full_a: Tensor | None = None, full_b: Tensor | None = None) -> None:
        """Takes this rank's part of each tensor that is given."""
        for parameter, full, axis in ((self.a, full_a, 1), (self.b, full_b, 0)):
            if full is not None:
                part = full.chunk(self.group.size(), axis)[self.group.rank()] if axis == self.axis else full
                parameter.copy_(part)

    def full_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of A and B before they are split."""
        (rank, inner), (outer, _) = self.a.shape, self.b.shape
        size = self.group.size()
        return (rank, inner * size if self.axis == 1 else inner), (outer * size if self.axis == 0 else outer, rank)


class Adapters(torch.nn.ModuleDict):
    """The pairs of one linear, by target. `row_sizes` are the rows of every module fused in the linear, by target: in
    each of its blocks, of which query, key and value have one for each key/value head and others one in all."""

    def __init__(self, linear: Linear, hf_modules: dict[str, str], row_sizes: dict[str, int], settings: Lora):
        weight: Any = linear.weight
        num_blocks = weight.shape[0] // sum(row_sizes.values())
        super().__init__(
            {t: Pair(name, linear, settings.rank, num_blocks * row_sizes[t]) for t, name in hf_modules.items()}
        )
        self.enabled = True
        self.scale = settings.scale
        self.dropout = settings.dropout
        self._row_sizes = row_sizes
        self._num_blocks = num_blocks
        self._column_parallel = isinstance(linear, ColumnParallelLinear)
        self._sequence_parallel: bool = linear.sequence_parallel
        self._is_expert: bool = linear.is_expert
        self._group: Any = linear.tp_group

    def forward(self, x: Tensor) -> Tensor:
        """What the adapters add to the output of their linear."""
        pairs: list[Any] = list(self.values())
        a, bs = torch.cat([pair.a for pair in pairs]), [pair.b for pair in pairs]
        if self._is_expert and self._column_parallel:
            a = copy_to_tensor_model_parallel_region(a, self._group)
        elif self._is_expert:
            bs = [copy_to_tensor_model_parallel_region(b, self._group) for b in bs]
        low = self._between_ranks(F.linear(self._dropped(x), a)) * self.scale
        parts = [F.linear(piece, b) for piece, b in zip(low.chunk(len(bs), -1), bs, strict=True)]
        return self._fused(dict(zip(self, parts, strict=True)))

    def _between_ranks(self, low: Tensor) -> Tensor:
        if self._is_expert:
            return low
        if self._column_parallel:
            move = (
                gather_from_sequence_parallel_region
                if self._sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        elif self._sequence_parallel:
            move = reduce_scatter_to_sequence_parallel_region
        else:
            move = reduce_from_tensor_model_parallel_region
        return move(low, group=self._group)

    def _dropped(self, x: Tensor) -> Tensor:
        """One mask for all modules of the linear. Ranks that hold the same entries must draw the same mask, and only
        the default random state is the same on them; where entries differ, so must the masks."""
        if not (self.training and self.dropout):
            return x
        states: Any = get_cuda_rng_tracker()
        draws: Any = contextlib.nullcontext()
        if self._is_expert:
            draws = states.fork(get_expert_parallel_rng_tracker_name())
        elif self._sequence_parallel or not self._column_parallel:
            draws = states.fork()
        with draws:
            return F.dropout(x, self.dropout)

    def _fused(self, parts: dict[str, Tensor]) -> Tensor:
        """The modules' outputs on the last axis, in the order in which the linear has its rows; zeros for modules
        without an adapter."""
        some = next(iter(parts.values()))
        blocks = [
            parts[target].unflatten(-1, (self._num_blocks, size))
            if target in parts
            else some.new_zeros(*some.shape[:-1], self._num_blocks, size)
            for target, size in self._row_sizes.items()
        ]
        return torch.cat(blocks, -1).flatten(-2)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """weight + scale * B A of this rank's part, computed in float32, in the dtype of `weight`."""
        pairs: dict[str, Any] = dict(self.items())
        products = {target: (pair.b.float() @ pair.a.float()).T for target, pair in pairs.items()}
        return (weight.float() + self.scale * self._fused(products).T).to(weight.dtype)

    def sharded(self, prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
        """Entries for Megatron's checkpoint, which may be loaded in another layout."""
        pairs: dict[str, Any] = dict(self.items())
        axes = {f"{target}.{'b' if pair.axis == 0 else 'a'}": pair.axis for target, pair in pairs.items()}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            f"{prefix}lora.",
            axes,
            offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class AdaptedColumnLinear(ColumnParallelLinear):
    """A ColumnParallelLinear whose attribute `lora` holds adapters. Its own parameters keep their names."""

    lora: Adapters

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output, bias = super().forward(input_, *args, **kwargs)
        return (output + self.lora(input_) if self.lora.enabled else output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return own | self.lora.sharded(prefix, sharded_offsets, metadata)


class AdaptedRowLinear(RowParallelLinear):
    """A RowParallelLinear whose attribute `lora` holds adapters. Its own parameters keep their names."""

    lora: Adapters

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        output, bias = super().forward(input_)
        return (output + self.lora(input_) if self.lora.enabled else output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return own | self.lora.sharded(prefix, sharded_offsets, metadata)


def adapt(linear: Linear, hf_modules: dict[str, str], row_sizes: dict[str, int], settings: Lora) -> None:
    """Puts pairs for `hf_modules` (names by target) on a linear, in place; until they are filled they add zero."""
    adapters = Adapters(linear, hf_modules, row_sizes, settings)
    # The linear stays the object that its layer holds, with its own weight; only its forward is another.
    adapted: Any = linear
    adapted.__class__ = AdaptedColumnLinear if isinstance(linear, ColumnParallelLinear) else AdaptedRowLinear
    adapted.lora = adapters


def _set(parameter: torch.nn.Parameter, **marks: Any) -> None:
    for name, value in marks.items():
        setattr(parameter, name, value)
