"""Weights between Hugging Face folders and a Megatron model that is split between ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch import distributed as dist

from rollstream.stages.megatron import cpu_platform, rules
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.mcore import state
from rollstream.stages.megatron.model import Model, padded_vocab_size


class Folder:
    """The safetensors of a model folder, one file or many with an index; tensors are read slice by slice."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file_of = self._index()
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"{str(self.folder)!r} has neither {single.name} nor {index.name}")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)

    def _slice(self, name: str) -> Any:
        if name not in self.file_of:
            raise ValueError(f"{str(self.folder)!r} has no tensor {name!r}")
        file = self.file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int, start: int, end: int) -> Tensor:
        """Entries `start` to `end` of one axis of a tensor."""
        part = self._slice(name)
        return part[start:end] if axis == 0 else part[:, start:end]


@torch.no_grad()
def load(model: Model, config: HFConfig) -> None:
    """Fills the model from `config.folder`; each rank reads only its own slices.

    Raises ValueError for a missing tensor or one of another shape than config.json says.
    """
    folder = Folder(config.folder)
    shapes = rules.hf_shapes(config)
    tp, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    padded = padded_vocab_size(config.vocab_size, tp)
    for name, parameter in model.named_parameters():
        rule = rules.rule_of(name)
        axis = 1 if rule.kind == "columns" else 0
        pieces: list[Tensor] = []
        for hf_name in rule.names:
            wanted = shapes[hf_name]
            if folder.shape(hf_name) != wanted:
                raise ValueError(f"{hf_name} in {str(config.folder)!r}: {folder.shape(hf_name)}, config says {wanted}")
            bounds = rules.local_range(rule.kind, wanted[axis], tp, rank, padded)
            pieces.append(folder.read(hf_name, axis, *bounds))
        parameter.copy_(rules.join(rule.kind, pieces, config, parameter.shape[0]))


def export(model: Model, config: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor on the host) of every weight, in the dtype of the model.

    Collective over the ranks of a model copy, which must iterate in step; only the first of each copy gets tensors.
    At most one parameter is gathered at a time. A tied output layer is not put out, nor is the vocabulary's padding.
    """
    for name, parameter in model.named_parameters():
        rule = rules.rule_of(name)
        with cpu_platform.on_platform():  # not around the yield: the caller is not on the platform
            parts = _gather(parameter.detach(), rule.kind)
            tensors = [_host_copy(t) for t in rules.split(rule.kind, parts, config)] if parts else []
        yield from zip(rule.names, tensors, strict=False)


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy that owns its memory: the next optimizer step must not change what was put out."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _gather(part: Tensor, kind: str) -> list[Tensor]:
    """The parts of all ranks, in order, on the first rank of the tensor-parallel group; nothing on the others."""
    group: Any = state.get_tensor_model_parallel_group()
    rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    if kind == "copy" or size == 1:
        return [part] if rank == 0 else []
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
    dist.gather(part, parts, group=group, group_dst=0)
    return parts or []
