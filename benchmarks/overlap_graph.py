"""The graph that overlap.py runs: stages whose costs are sleeps, with groups of the size of real ones.

endless prompts -> paced (a step's groups take generation_s) -> reward -> advantage -> timed update (training_s)
                                                              -> ref, beside the reward --^

Reward, reference and advantage cost nothing but their own bytes: what a step takes beyond the sleeps is the runner's,
the edges' and Ray's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from memory_graph import NUM_SAMPLES, NUM_TOKENS, Endless, Ref, per_token, sampled

from rollstream import Graph, Weights
from rollstream.graphs.discard import Discard
from rollstream.stages.base import LARGEST, MapStage, Metric, RolloutStage, Stage, Stream, check_wiring
from rollstream.stages.schema import Advantaged, Prompted, Rollouts, Scored, Trained, WithRef

#: The largest age of a step's groups in versions, read off their tokens by the update stage.
AGE = "overlap/age"


class Paced(RolloutStage[Prompted, Rollouts]):
    """An engine that ends one group every `group_s` as long as it has any: it takes groups as others end, holds those
    that it has no room for yet, as engines do, and takes weights at any time."""

    config: Config
    continuous = True
    updates_in_flight = True
    version = 0

    @dataclass(frozen=True, kw_only=True)
    class Config(Stage.Config):
        """How many groups it has at once, and how far apart they end."""

        groups_in_flight: int
        group_s: float

    def __init__(self, config: Config):
        super().__init__(config)
        self.under_way: list[tuple[float, int, pa.RecordBatch]] = []  # when it ends, its first version, its prompt
        self.last_end_s = 0.0

    @property
    def groups_in_flight(self) -> int:
        return self.config.groups_in_flight

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        assert [int(value[0]) for _, value in tensors] == [version]
        self.version = version

    def submit(self, group: pa.RecordBatch) -> None:
        self.last_end_s = max(self.last_end_s, time.monotonic()) + self.config.group_s
        self.under_way.append((self.last_end_s, self.version, group))

    def finished(self, timeout_s: float) -> pa.RecordBatch | None:
        if not self.under_way:
            return None
        ends, version, group = self.under_way[0]
        time.sleep(min(max(ends - time.monotonic(), 0.0), timeout_s))
        if time.monotonic() < ends:
            return None
        self.under_way.pop(0)
        return sampled(group, version)


class Reward(MapStage[Rollouts, Scored]):
    """No reward."""

    def process(self, group: pa.RecordBatch) -> dict[str, pa.Array]:
        parts = pa.array([{}] * NUM_SAMPLES, Scored.columns["reward_parts"])
        return {"reward": pa.array([0.0] * NUM_SAMPLES), "reward_parts": parts}


class Advantage(MapStage[Scored, Advantaged]):
    """A number for each token."""

    def process(self, group: pa.RecordBatch) -> dict[str, pa.Array]:
        return {"advantages": per_token(np.zeros(NUM_SAMPLES * NUM_TOKENS, dtype=np.float32))}


class TimedUpdate(Discard):
    """Reads its groups and sleeps. Its weights are one number, the count of its steps, which is their version."""

    config: Config

    @dataclass(frozen=True, kw_only=True)
    class Config(Discard.Config):
        """How many groups a step takes, and how long it is."""

        training_s: float

    version = 0

    def __call__(self, stream: Stream[Advantaged], *, ref: Stream[WithRef]) -> Stream[Trained]:
        check_wiring(self, stream, Advantaged)
        check_wiring(self, ref, WithRef, "ref")
        return self._wire(stream=stream, ref=ref)

    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        begun = time.monotonic()
        columns = [group.column("weight_version").values.to_numpy() for group in groups]
        oldest = min(int(column.min()) for column in columns)
        time.sleep(max(self.config.training_s - (time.monotonic() - begun), 0.0))
        age = self.version - oldest
        self.version += 1
        return {AGE: (float(age), LARGEST), "actor/tokens": (float(sum(map(len, columns))), 1.0)}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "version", np.array([self.version])


def graph(groups_per_step: int, generation_s: float, training_s: float, max_staleness: int) -> Graph:
    paced = Paced.Config(groups_in_flight=2 * groups_per_step, group_s=generation_s / groups_per_step)
    rollouts = Paced(paced)(Endless())
    advantages = Advantage()(Reward()(rollouts))
    config = TimedUpdate.Config(groups_per_step=groups_per_step, training_s=training_s)
    output = TimedUpdate(config)(advantages, ref=Ref()(rollouts))
    return Graph("overlap", output=output, weights=Weights(output, to=rollouts, max_staleness=max_staleness))
