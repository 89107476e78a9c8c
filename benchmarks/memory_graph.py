"""The graph that edge_memory.py runs: big groups made quickly, and an update stage that is slower than all before it.

endless prompts -> tokens (a group is 0.4 MB) -> ref (adds 0.13 MB) -> slow update
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rollstream import Bounds, Graph, Weights
from rollstream.graphs.discard import Discard
from rollstream.stages.base import Filtered, MapStage, Metric, RolloutStage, Source, Stream, check_wiring
from rollstream.stages.schema import Prompted, Rollouts, Trained, WithRef

NUM_SAMPLES = 8
NUM_TOKENS = 4096


class Endless(Source[Prompted]):
    """Prompts without end."""

    def rows(self, skip: frozenset[int], start: int) -> Iterator[pa.RecordBatch]:
        order = start
        while True:
            if order not in skip:
                row = [f"g{order}", order, "a prompt", [1, 2], "null", "{}"]
                yield pa.RecordBatch.from_arrays(
                    [pa.array([value], kind) for value, kind in zip(row, Prompted.columns.values(), strict=True)],
                    schema=Prompted.arrow(),
                )
            order += 1

    def fingerprint(self) -> str:
        return "endless"


class Tokens(RolloutStage[Prompted, Rollouts]):
    """Samples of NUM_TOKENS tokens each, made without a model."""

    version = 0
    groups_in_flight = 4

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[pa.RecordBatch] = []

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        self.version = version

    def submit(self, group: pa.RecordBatch) -> None:
        self.groups.append(group)

    def finished(self, timeout_s: float) -> pa.RecordBatch | None:
        if not self.groups:
            return None
        return sampled(self.groups.pop(0), self.version)


class Ref(MapStage[Rollouts, WithRef]):
    """A number for each token."""

    def process(self, group: pa.RecordBatch) -> dict[str, pa.Array]:
        return {"ref_logprobs": per_token(np.zeros(NUM_SAMPLES * NUM_TOKENS, dtype=np.float32))}


class SlowUpdate(Discard):
    """Sleeps, and counts its steps: that number is its weights. Which groups it had is in the ledger."""

    config: Config

    @dataclass(frozen=True, kw_only=True)
    class Config(Discard.Config):
        """How much a step takes, and how long."""

        sleep_s: float = 0.4

    step = 0

    def __call__(self, stream: Stream[WithRef]) -> Stream[Trained]:
        check_wiring(self, stream, WithRef)
        return self._wire(stream=stream)

    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        time.sleep(self.config.sleep_s)
        self.step += 1
        tokens = sum(len(group.column("ref_logprobs").values) for group in groups)
        return {"actor/tokens": (float(tokens), 1.0)}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "step", np.array([self.step])


def sampled(group: pa.RecordBatch, version: int) -> pa.RecordBatch:
    """NUM_SAMPLES rows of a prompt's group, all tokens of them by the weights of this version."""
    prompt = group.take(pa.array([0] * NUM_SAMPLES, pa.int32()))
    ids = pa.array([f"{group.column('group_id')[0].as_py()}.{draw}" for draw in range(NUM_SAMPLES)])
    new = {
        "sample_id": ids,
        "response": pa.array(["text"] * NUM_SAMPLES),
        "response_ids": per_token(np.arange(NUM_SAMPLES * NUM_TOKENS, dtype=np.int32)),
        "loss_mask": per_token(np.ones(NUM_SAMPLES * NUM_TOKENS, dtype=np.bool_)),
        "finish_reason": pa.array(["length"] * NUM_SAMPLES),
        "rollout_logprobs": per_token(np.zeros(NUM_SAMPLES * NUM_TOKENS, dtype=np.float32)),
        "weight_version": per_token(np.full(NUM_SAMPLES * NUM_TOKENS, version, dtype=np.int32)),
    }
    columns = {name: prompt.column(name) for name in prompt.schema.names} | new
    return pa.RecordBatch.from_arrays([columns[name] for name in Rollouts.columns], schema=Rollouts.arrow())


def per_token(values: np.ndarray) -> pa.Array:
    """A list of NUM_TOKENS values for each sample."""
    offsets = pa.array(np.arange(NUM_SAMPLES + 1, dtype=np.int32) * NUM_TOKENS)
    return pa.ListArray.from_arrays(offsets, pa.array(values))


def graph(update: SlowUpdate.Config, bounds: Bounds, max_staleness: int) -> Graph:
    rollouts = Tokens()(Endless())
    output = SlowUpdate(update)(Ref()(rollouts))
    weights = Weights(output, to=rollouts, max_staleness=max_staleness)
    return Graph("edge_memory", output=output, weights=weights, bounds=bounds)


def group_bytes() -> dict[str, int]:
    """Bytes that one group adds to the edge behind each stage."""
    prompt = next(Endless().rows(frozenset(), 0))
    rollout = next(Tokens().run([prompt]))
    part = Ref().run(rollout)
    assert not isinstance(part, Filtered)
    return {"endless": prompt.nbytes, "tokens": rollout.nbytes, "ref": part.nbytes}
