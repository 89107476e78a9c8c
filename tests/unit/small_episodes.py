"""A tokenizer and an engine for episodes, which say what they are told to."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rollstream.stages.rollout.engine import Request, Sample
from rollstream.stages.rollout.model_limits import ModelLimits

EOS = 1
LIMITS = ModelLimits(vocabulary=100, context=40, eos_ids=frozenset([EOS]))


class Digits:
    """A tokenizer that does not round-trip: 10 + d is digit d, but a pair such as "42" is encoded as one token."""

    def __call__(self, text: str, *, add_special_tokens: bool):
        assert not add_special_tokens
        return type("Encoded", (), {"input_ids": [50 + int(text[i : i + 2]) % 50 for i in range(0, len(text), 2)]})

    def decode(self, ids, **_):
        return "".join(str(i - 10) for i in ids if i >= 10)


class Scripted:
    """An engine that answers the k-th request of a sample with the k-th turn of `turns`, cut at its max_tokens."""

    def __init__(self, *turns: list[int], continuous: bool = False):
        self.turns, self.continuous, self.version = turns, continuous, 3
        self.requests: list[Request] = []
        self.batches: list[list[str]] = []
        self._waiting: list[Request] = []
        self._ended: list[tuple[str, list[Sample]]] = []

    def submit(self, request: Request) -> None:
        LIMITS.budget(request, "rollout")
        self.requests.append(request)
        self._waiting.append(request)

    def finished(self, timeout_s: float):
        if not self._ended and self._waiting:
            self.batches.append([r.request_id for r in self._waiting])
            self._ended = [(r.request_id, [self._sample(r)]) for r in self._waiting]
            self._waiting = []
        return self._ended.pop(0) if self._ended else None

    def _sample(self, request: Request) -> Sample:
        turn = self.turns[int(request.request_id.partition("#")[2] or 1) - 1]
        ids = np.array(turn[: request.sampling.max_tokens], np.int32)
        return Sample(
            response_ids=ids,
            logprobs=-ids.astype(np.float32) / 8,
            versions=np.full(len(ids), self.version, np.int32),
            finish_reason="stop" if len(ids) and ids[-1] == EOS else "length",
        )

    def load_weights(self, version, tensors): ...
    def close(self): ...


def group(name: str = "g0") -> pa.RecordBatch:
    row = {"group_id": name, "order": 0, "prompt": "12", "prompt_ids": [11, 12], "target": "[4]", "meta": '{"k": 1}'}
    return pa.RecordBatch.from_pylist([row])
