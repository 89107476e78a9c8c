"""The weight edge: versioned weights from the update stage to whoever samples with them.

    ActorUpdate.weights() --publish(version, buckets)--> WeightStore --latest()--> Rollout

Where all rollout processes have the update stage's one GPU, or without GPUs its machine, the weights stay there, in a
buffer that they read (shared_weights.py). Else, and for evaluations, they travel as buckets of tensors in the object
store, put there by the update stage's rank 0. Only the newest version is kept. A rollout host takes the newest before
it begins a group; rollout_loop.py says when else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollstream.graphs import actors
from rollstream.stages.base import Stream
from rollstream.stages.errors import ConfigError, WiringError
from rollstream.stages.schema import Rollouts, Trained
from rollstream.stages.shared_weights import SharedWeights

BUCKET_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Weights:
    """Sends the weights of an update stage to a rollout stage.

    max_staleness = k: a group may be trained on at most k versions after the version that began it. 0 is strictly
    on-policy; 1 and more let generation overlap training.
    """

    source: Stream[Trained]
    to: Stream[Rollouts]
    max_staleness: int = 0

    def __post_init__(self) -> None:
        ends: dict[str, object] = {"source": self.source, "to": self.to}
        faults = [
            f"Weights' {name} must be a stream (a stage called on a stream), got {type(stream).__name__}"
            for name, stream in ends.items()
            if not isinstance(stream, Stream)
        ]
        if faults:
            raise WiringError(faults)
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 or more, got {self.max_staleness}")

    def admitted(self, version: int, groups_per_step: int) -> int:
        """Groups that may have been dispatched in all while the weights are at `version`."""
        return (self.max_staleness + version + 1) * groups_per_step


@dataclass(frozen=True, kw_only=True)
class Published:
    """One version of the weights: ObjectRefs of lists of (name, array); and where readers on the update stage's machine
    and GPU find them, or that alone, where nobody needs arrays."""

    version: int
    buckets: tuple[Any, ...] = ()
    shared: SharedWeights | None = None


class WeightStore:
    """Async actor that holds the newest version. Its own death loses nothing but that: it is published again."""

    def __init__(self) -> None:
        self._newest: Published | None = None
        self._published = asyncio.Condition()

    async def stay(self) -> None:
        """Never answers: its error is how the runner learns of this actor's death."""
        await asyncio.Event().wait()

    async def publish(self, version: int, buckets: Sequence[Any], shared: SharedWeights | None) -> None:
        if self._newest is not None:
            assert version >= self._newest.version, f"version {version} after {self._newest.version}"
        async with self._published:
            self._newest = Published(version=version, buckets=tuple(buckets), shared=shared)
            self._published.notify_all()

    async def latest(self, than: int = -1, *, timeout_s: float = math.inf) -> Published | None:
        """The newest version; waits for one that is newer than `than`, None where none comes in time."""
        give_up = time.monotonic() + timeout_s
        async with self._published:
            while self._newest is None or self._newest.version <= than:
                left_s = give_up - time.monotonic()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._published.wait(), None if left_s == math.inf else max(left_s, 0))
                if time.monotonic() >= give_up and (self._newest is None or self._newest.version <= than):
                    return None
        return self._newest


def bucketed(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Tensors in order, in lists of at most BUCKET_BYTES (or one tensor that is larger)."""
    bucket: list[tuple[str, np.ndarray]] = []
    size = 0
    for name, array in tensors:
        if bucket and size + array.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, array))
        size += array.nbytes
    if bucket:
        yield bucket


def make_weight_store() -> Any:
    return actors.start(WeightStore, comes_back=True, max_concurrency=1000)
