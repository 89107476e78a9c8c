"""Moves what an update stage holds off its device while another stage computes there.

    leave()     device -> host memory, pinned where there is CUDA; the device's memory is free for others
    bring()     back again; parameters are there when it returns, the optimizer's state may still be on its way
    settle()    before the optimizer step: all is there

It moves storages, not tensors: every view of one, in Megatron's buffers and in the optimizer, is valid again after
`bring`, whatever it is a view of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollstream.stages.megatron.optimizer import parts_of

if TYPE_CHECKING:
    from rollstream.stages.megatron.trainer import Trainer


class Offload:
    """Of what `trainer` holds, the `kinds` that leave the device: "parameters", "gradients", "optimizer".

    Gradients are not copied: they are zero between two steps. What the optimizer shares with parameters goes with
    these.
    """

    def __init__(self, trainer: Trainer, kinds: Sequence[str]):
        self._trainer, self._kinds = trainer, kinds
        self._away: dict[str, list[_Away]] = {}
        self._host: dict[tuple[str, int], Tensor] = {}
        self._stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None

    def leave(self) -> int:
        """Frees the device, and gives how many bytes of it. Does nothing where all is away."""
        if self._away:
            return 0
        self.settle()
        self._away = {kind: self._find(kind) for kind in self._kinds}
        with self._on_stream():
            for kind in ("parameters", "optimizer"):
                for index, away in enumerate(self._away.get(kind, ())):
                    away.host = self._host_memory(kind, index, away.nbytes)
                    away.host.copy_(_bytes_of(away.storage), non_blocking=True)
        self.settle()  # a copy must be whole before its source is freed
        freed = 0
        for away in (away for held in self._away.values() for away in held):
            away.storage.resize_(0)
            freed += away.nbytes
        if freed and self._stream is not None:
            torch.cuda.empty_cache()
        return freed

    def bring(self) -> None:
        """Takes the device again. Does nothing where all is there."""
        away, self._away = self._away, {}
        for held in away.values():
            for each in held:
                each.storage.resize_(each.nbytes)
        for each in away.get("gradients", ()):
            _bytes_of(each.storage).zero_()
        with self._on_stream():
            _copy_back(away.get("parameters", ()))
            arrived = self._stream.record_event() if self._stream is not None else None
            _copy_back(away.get("optimizer", ()))
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)

    def settle(self) -> None:
        """Waits for copies that are under way."""
        if self._stream is not None:
            self._stream.synchronize()

    def _find(self, kind: str) -> list[_Away]:
        """Each storage of a kind. Not kept from one time to the next: an optimizer that is loaded has new ones."""
        trainer = self._trainer
        found = _storages(p for chunk in trainer.policy.chunks for p in chunk.parameters())
        if kind == "gradients":
            chunks: list[Any] = list(trainer.ddp)  # whose `buffers` are Megatron's, not the method of a module
            buffers = (b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
            found = _storages(buffer.grad_data for buffer in buffers)
        elif kind == "optimizer":
            held = _storages(_optimizer_tensors(trainer.optimizer))
            found = {place: storage for place, storage in held.items() if place not in found}
        return [_Away(storage=storage, nbytes=storage.nbytes()) for storage in found.values()]

    def _host_memory(self, kind: str, index: int, nbytes: int) -> Tensor:
        """Kept for the next time: pinning is slow."""
        memory = self._host.get((kind, index))
        if memory is None or len(memory) != nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)
            self._host[kind, index] = memory
        return memory

    @contextlib.contextmanager
    def _on_stream(self) -> Generator[None]:
        """Copies within it come after all that was asked of the device before, and run beside what is asked later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


@dataclass
class _Away:
    """A storage whose bytes are on the host."""

    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor | None = None


def _copy_back(held: Iterable[_Away]) -> None:
    for away in held:
        assert away.host is not None
        _bytes_of(away.storage).copy_(away.host, non_blocking=True)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, by where it lies."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _optimizer_tensors(optimizer: Any) -> Iterable[Tensor]:
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for values in part.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor) and value.dim())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
