"""What a Megatron stage holds in its process, from `setup` to `close`. Every public method runs on the platform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rollstream.stages.base import Metric, World
from rollstream.stages.megatron import checkpoint, export, lora, parallel
from rollstream.stages.megatron.batch import read_samples
from rollstream.stages.megatron.checkpoint_writer import CheckpointWriter
from rollstream.stages.megatron.cpu_platform import device, on_platform
from rollstream.stages.megatron.policy import Policy
from rollstream.stages.megatron.policy_update import PolicyUpdate
from rollstream.stages.megatron.trainer import Trainer
from rollstream.stages.megatron.weight_buffer import WeightBuffer
from rollstream.stages.shared_weights import SharedWeights

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate
    from rollstream.stages.logprob import RefLogprob


class RefSession:
    """A frozen policy that scores samples."""

    @on_platform()
    def __init__(self, config: RefLogprob.Config, world: World):
        parallel.init(world, config.layout, seed=0)
        self._policy = Policy(config)
        for chunk in self._policy.chunks:
            chunk.requires_grad_(False)

    @on_platform()
    def logprobs(self, group: pa.RecordBatch) -> list[np.ndarray]:
        """Log-probabilities of each row's response, float32; collective over the model's ranks."""
        samples = read_samples([group])
        cut = self._policy.cut(samples)
        batches = self._policy.pack(samples, cut, ())
        scored: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
        for indices, batch, scores in zip(cut, batches, self._policy.score(batches), strict=True):
            if not indices:
                continue  # there to make up the number
            flat = scores.cpu().numpy()
            for index, part in zip(indices, np.split(flat, np.cumsum(batch.lengths)[:-1]), strict=True):
                scored[index] = part[: len(samples[index].response_ids)]
        return scored

    def close(self) -> None:
        parallel.destroy()


class ActorSession:
    """A policy with its optimizer."""

    @on_platform()
    def __init__(self, config: ActorUpdate.Config, world: World, *, has_ref: bool):
        parallel.init(world, config.layout, config.seed)
        self._policy = Policy(config, seed=config.seed)
        if config.lora is not None:
            lora.add_lora(self._policy.chunks, config.lora, self._policy.config, seed=config.seed)
        self._trainer = Trainer(self._policy, config)
        self._update = PolicyUpdate(self._trainer, config, has_ref=has_ref)
        self._writer = CheckpointWriter()
        self._buffer = WeightBuffer(self._policy.tensors, device(), is_first=parallel.is_first())

    @on_platform()
    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        self._trainer.offload.bring()
        return self._update.run(groups)

    @on_platform()
    def rest(self) -> None:
        """Others may have the device until the next call."""
        self._trainer.offload.leave()

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Collective over the world; rank 0 gets them."""
        self._trainer.offload.bring()
        for name, tensor in self._policy.host_tensors():
            yield name, tensor.float().numpy()

    @on_platform()
    def share_weights(self, version: int) -> SharedWeights | None:
        """Collective over the world; rank 0 gets them."""
        self._trainer.offload.bring()
        return self._buffer.put(version)

    @on_platform()
    def save(self, folder: Path) -> None:
        self._trainer.offload.bring()
        self._trainer.offload.settle()
        self._writer.save(self._trainer, folder)

    @on_platform()
    def finish_save(self) -> None:
        self._writer.finish()

    @on_platform()
    def load(self, folder: Path) -> None:
        self._writer.finish()
        self._trainer.offload.bring()
        self._trainer.offload.settle()
        checkpoint.load(self._trainer, folder)
        self._update.gated = False  # a resumed run has passed the gate, and its rollouts may be older than its weights

    @on_platform()
    def export(self, folder: Path) -> None:
        """Adapters, where they are trained, are in the weights, and in the folder `adapter` by themselves."""
        self._trainer.offload.bring()
        tensors = self._policy.host_tensors()
        if parallel.is_first():
            export.write(folder, tensors, self._policy.config)
        else:
            for _ in tensors:
                pass
        settings = self._trainer.settings.lora
        if settings is not None:
            lora.export_adapter(folder / "adapter", self._policy.chunks, settings, self._policy.config)

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._buffer.close()
            parallel.destroy()
