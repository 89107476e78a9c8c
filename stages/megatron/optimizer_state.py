"""The optimizer's state as tensors by parameter, each rank with what it holds itself.

Megatron lays all parameters of a rank end to end and deals the row to the data-parallel ranks, so that a rank's share
of a parameter is a run of entries of the flattened tensor. A checkpoint holds tensors in their own shape: such a run is
written as boxes of it, and any other layout reads the boxes that its own shares overlap.

    parameter [4, 3], entries 2..10 held here:      . . x    box (0, 2), size (1, 1)
                                                    x x x    box (1, 0), size (2, 3)
                                                    x x x
                                                    x . .    box (3, 0), size (1, 1)

Nothing is sent between ranks, neither to save nor to load.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollstream.stages.megatron.mcore import ShardedTensor, ShardedTensorFactory, nested_values
from rollstream.stages.megatron.optimizer import TorchAdamOptimizer, parts_of

Box = tuple[tuple[int, ...], tuple[int, ...]]


def sharded_tensors(optimizer: Any, model: dict[str, Any]) -> dict[str, ShardedTensor]:
    """Adam's moments and the float32 weights that this rank holds, as entries of a checkpoint; their data are the
    optimizer's own memory, so that what is loaded into them is in place.

    `model` are the entries of the model's own parameters, which say what part of the whole model each is. Weights that
    are float32 in the model are there already, and left out here.
    """
    entry_of = {entry.data: entry for entry in nested_values(model) if hasattr(entry, "data")}
    pieces: list[ShardedTensor] = []
    for part in parts_of(optimizer):
        for parameter, begin in _owned(part):
            states = dict(part._get_main_param_and_optimizer_states(parameter))
            if parameter.dtype == torch.float32:
                del states["param"]
            for name, flat in states.items():
                if name != "step":
                    pieces += _pieces(f"optimizer.{name}", entry_of[parameter], parameter, begin, flat.detach())
    return {str(index): piece for index, piece in enumerate(pieces)}


def _owned(part: Any) -> Iterator[tuple[Tensor, int]]:
    """Parameters of which this rank holds entries, and the first of these in the flattened parameter."""
    for of_dtypes in part.gbuf_ranges:
        for buckets in of_dtypes.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _pieces(prefix: str, entry: Any, parameter: Tensor, begin: int, flat: Tensor) -> Iterator[ShardedTensor]:
    """`flat`, the entries of the flattened parameter from `begin` on, as boxes of the tensors in the checkpoint."""
    wholes: Any = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    for whole in wholes:  # one, or where two modules are fused in a parameter, one of each
        at = int(whole.data.storage_offset() - parameter.storage_offset())
        low, high = max(begin, at), min(begin + flat.numel(), at + whole.data.numel())
        position = low - begin
        for offsets, sizes in boxes(tuple(whole.data.shape), low - at, high - at):
            count, ones = math.prod(sizes), (1,) * whole.prepend_axis_num
            sizes, offsets = (*ones, *sizes), (*(0 for _ in ones), *offsets)
            yield dataclasses.replace(
                whole,
                key=f"{prefix}.{whole.key}",
                data=flat[position : position + count].view(sizes),
                dtype=flat.dtype,
                local_shape=sizes,
                global_offset=tuple(a + b for a, b in zip(whole.global_offset, offsets, strict=True)),
                axis_fragmentations=None,
                replica_id=(*whole.replica_id[:2], 0),  # other data-parallel ranks have other boxes
                prepend_axis_num=0,
            )
            position += count


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """(offsets, sizes) of boxes that hold the entries from `low` to below `high` of a flattened tensor, in their order.

    >>> list(boxes((4, 3), 2, 10))
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if len(shape) == 1:
        if low < high:
            yield (low,), (high - low,)
        return
    row = math.prod(shape[1:])
    while low < high:
        index, inside = divmod(low, row)
        end = min(high, (index + 1) * row)
        if inside or end - low < row:
            yield from (((index, *o), (1, *s)) for o, s in boxes(shape[1:], inside, end - index * row))
        else:
            num_rows = (high - low) // row
            yield (index, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
            end = low + num_rows * row
        low = end


def progress(optimizer: Any) -> dict[str, Any]:
    """What is no tensor: the optimizer steps made, and in float16 the loss scale. All else follows from the settings
    and the schedule."""
    first = parts_of(optimizer)[0]
    counts = [*first.optimizer.state.values(), *first.optimizer.param_groups]
    steps = next((int(found["step"]) for found in counts if "step" in found), 0)
    return {"steps": steps, "loss_scale": first.grad_scaler.state_dict() if first.grad_scaler else None}


def set_progress(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Restores what `progress` gave."""
    for part in parts_of(optimizer):
        if isinstance(part, TorchAdamOptimizer):  # it counts in the state of each parameter
            for state in part.optimizer.state.values():
                state["step"].fill_(saved["steps"])
        else:
            for group in part.optimizer.param_groups:
                group["step"] = saved["steps"]
        if part.grad_scaler:
            part.grad_scaler.load_state_dict(saved["loss_scale"])
