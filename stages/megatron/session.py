"""What a Megatron stage holds in its process, from `setup` to `close`. Every public method runs on the platform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rollstream.stages.base import Metric, World
from rollstream.stages.megatron import checkpoint, export, parallel, weights
from rollstream.stages.megatron.batch import cut, read_samples
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.policy import Policy
from rollstream.stages.megatron.policy_update import PolicyUpdate
from rollstream.stages.megatron.trainer import Trainer

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate
    from rollstream.stages.logprob import RefLogprob


class RefSession:
    """A frozen policy that scores samples."""

    @on_platform()
    def __init__(self, config: RefLogprob.Config, world: World):
        parallel.init(world, Layout(tp=config.tp), seed=0)
        self._micro_batch_size = config.micro_batch_size
        self._policy = Policy(config.model, dtype=config.dtype, temperature=config.temperature)
        self._policy.model.eval().requires_grad_(False)

    @on_platform()
    def logprobs(self, group: pa.RecordBatch) -> list[np.ndarray]:
        """Log-probabilities of each row's response, float32; collective over the model's ranks."""
        scored: list[np.ndarray] = []
        for batch in cut(read_samples([group]), self._micro_batch_size):
            flat = self._policy.score(batch).cpu().numpy()
            scored += np.split(flat[: sum(batch.lengths)], np.cumsum(batch.lengths)[:-1])
        return scored

    def close(self) -> None:
        parallel.destroy()


class ActorSession:
    """A policy with its optimizer."""

    @on_platform()
    def __init__(self, config: ActorUpdate.Config, world: World, layout: Layout, *, has_ref: bool):
        parallel.init(world, layout, config.seed)
        self._policy = Policy(config.model, dtype=config.dtype, temperature=config.temperature)
        self._trainer = Trainer(self._policy, config)
        self._update = PolicyUpdate(self._trainer, config, has_ref=has_ref)

    @on_platform()
    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        return self._update.run(groups)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Collective over the ranks of the first model copy; the other copies hold the same and have no part in it."""
        if not parallel.in_first_copy():
            return
        for name, tensor in weights.export(self._policy.model, self._policy.config):
            yield name, tensor.float().numpy()

    @on_platform()
    def save(self, folder: Path) -> None:
        checkpoint.save(self._trainer, folder)

    @on_platform()
    def load(self, folder: Path) -> None:
        checkpoint.load(self._trainer, folder)
        self._update.gated = False  # a resumed run has passed the gate, and its rollouts may be older than its weights

    @on_platform()
    def export(self, folder: Path) -> None:
        if not parallel.in_first_copy():
            return
        tensors = weights.export(self._policy.model, self._policy.config)
        if parallel.is_first():
            export.write(folder, tensors, self._policy.config)
        else:
            for _ in tensors:
                pass

    def close(self) -> None:
        parallel.destroy()
