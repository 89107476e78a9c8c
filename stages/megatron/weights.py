"""Weights of a Megatron model that is split between ranks, from and to Hugging Face form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from rollstream.stages.megatron import cpu_platform, lora, rules
from rollstream.stages.megatron.folder import Folder, RandomFolder
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.mcore import state
from rollstream.stages.megatron.model import Model, padded_vocab_size


@torch.no_grad()
def load(chunks: Sequence[Model], config: HFConfig, folder: Folder | RandomFolder) -> None:
    """Fills the chunks from `folder`; each rank reads only its own slices.

    Raises ValueError for a missing tensor or one of another shape than config.json says.
    """
    shapes = rules.hf_shapes(config)
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = chunk.global_name(local_name)
            rule = rules.rule_of(name, config)
            tp, rank = _split_of(name)
            padded = padded_vocab_size(config.vocab_size, tp)
            axis = 1 if rule.kind == "columns" else 0
            pieces: list[Tensor] = []
            for hf_name in rule.names:
                wanted = shapes[hf_name]
                if folder.shape(hf_name) != wanted:
                    raise ValueError(
                        f"{hf_name} in {str(config.folder)!r}: {folder.shape(hf_name)}, config.json says {wanted}"
                    )
                bounds = rules.local_range(rule.kind, wanted[axis], tp, rank, padded)
                pieces.append(folder.read(hf_name, axis, *bounds))
            parameter.copy_(rules.join(rule.kind, pieces, config, parameter.shape[0]))


def _split_of(name: str) -> tuple[int, int]:
    """Ranks that share a parameter, and which of them this one is."""
    expert = rules.is_expert(name)
    group: Any = state.get_expert_tensor_parallel_group() if expert else state.get_tensor_model_parallel_group()
    return dist.get_world_size(group), dist.get_rank(group)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """What one rank holds of a parameter."""

    name: str  # in the whole model
    chunk: int
    local_name: str
    part: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Gatherer:
    """Brings a model to rank 0, one parameter at a time, whatever the layout; `tensors` is collective over the world.

    Which rank sends what is agreed on once: of the ranks that hold the same piece, the first.
    """

    def __init__(self, chunks: Sequence[Model], config: HFConfig):
        self._chunks, self._config = chunks, config
        self._routes: list[tuple[rules.Rule, list[tuple[int, _Piece]]]] | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor on this rank's device) of every weight, adapters merged in, in the dtype of the
        model; may be the weight itself, which the next optimizer step changes.

        All ranks must iterate in step; rank 0 alone gets tensors. A tied output layer is not put out, nor is the
        vocabulary's padding.
        """
        for rule, pieces in self._agreed():
            with cpu_platform.on_platform():  # not around the yield: the caller is not on the platform
                parts = self._gather(pieces)
                tensors = [t.contiguous() for t in rules.split(rule.kind, parts, self._config)] if parts else []
            yield from zip(rule.names, tensors, strict=False)

    def _agreed(self) -> list[tuple[rules.Rule, list[tuple[int, _Piece]]]]:
        """For each parameter in the order of the model: its rule, and which rank sends which piece."""
        if self._routes is not None:
            return self._routes
        held: list[list[_Piece]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(held, list(self._pieces()))
        owners: dict[str, dict[int, tuple[int, _Piece]]] = {}
        for rank, pieces in enumerate(held):
            for piece in pieces:
                owners.setdefault(piece.name, {}).setdefault(piece.part, (rank, piece))
        order = {name: index for index, name in enumerate(rules.hf_shapes(self._config))}
        ruled = [(rules.rule_of(name, self._config), parts) for name, parts in owners.items()]
        ruled.sort(key=lambda pair: order[pair[0].names[0]])
        self._routes = [(rule, [parts[i] for i in sorted(parts)]) for rule, parts in ruled]
        return self._routes

    def _pieces(self) -> Iterator[_Piece]:
        for index, chunk in enumerate(self._chunks):
            for local_name, parameter in chunk.named_parameters():
                name = chunk.global_name(local_name)
                if lora.is_adapter(name) or (name == "output_layer.weight" and self._config.tied):
                    continue
                part = 0 if rules.rule_of(name, self._config).kind == "copy" else _split_of(name)[1]
                yield _Piece(
                    name=name,
                    chunk=index,
                    local_name=local_name,
                    part=part,
                    shape=tuple(parameter.shape),
                    dtype=parameter.dtype,
                )

    def _gather(self, pieces: Sequence[tuple[int, _Piece]]) -> list[Tensor]:
        """The pieces, in order, on rank 0; nothing on the others."""
        me = dist.get_rank()
        parts: list[Tensor] = []
        for owner, piece in pieces:
            if owner == me:
                part = self._own(piece)
                if me == 0:
                    parts.append(part)
                else:
                    dist.send(part, dst=0)
            elif me == 0:
                part = torch.empty(piece.shape, dtype=piece.dtype, device=cpu_platform.device())
                dist.recv(part, src=owner)
                parts.append(part)
        return parts

    @torch.no_grad()
    def _own(self, piece: _Piece) -> Tensor:
        chunk = self._chunks[piece.chunk]
        return lora.merged(chunk, piece.local_name, chunk.get_parameter(piece.local_name).detach()).contiguous()
