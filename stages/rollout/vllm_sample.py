"""One sample drawn by vLLM: its tokens as they come, cut off and gone on with where weights are replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.engine import Sample, Sampling


class Weights(Protocol):
    """Which weights there are."""

    version: int

    async def ready(self) -> None:
        """Waits until no weights are on their way."""
        ...


@dataclass
class Draw:
    """A sample under way: `prompt_ids` and what came so far, of at most `budget` tokens."""

    sample_id: str
    prompt_ids: Sequence[int]
    budget: int
    sampling: Sampling
    stop_ids: Sequence[int]
    stage: str
    tokens: list[int] = field(default_factory=lambda: [])
    logprobs: list[float] = field(default_factory=lambda: [])
    versions: list[int] = field(default_factory=lambda: [])

    async def run(self, generate: Callable[..., Any], weights: Weights, request_id: str, *, stream: bool) -> Sample:
        """The sample, once it has ended. With `stream` its tokens are handed over as they come; without, all at once,
        and then it must be cut off before the weights change."""
        number = 0
        while True:
            await weights.ready()
            prompt = {
                "prompt_token_ids": [*self.prompt_ids, *self.tokens],
                "cache_salt": str(weights.version),  # what other weights have left in the prefix cache is not for us
            }
            reason = None
            async for output in generate(prompt, self._params(stream), request_id=f"{request_id}#{number}"):
                completion = output.outputs[0]
                self._take(completion.token_ids, completion.logprobs, weights.version)
                reason = completion.finish_reason
            if reason in ("stop", "length"):
                return self._sample(reason)
            if reason != "abort":
                raise StageError(self.stage, self.sample_id, f"vLLM ended it with finish reason {reason!r}.")
            number += 1

    def _params(self, stream: bool) -> SamplingParams:
        s, done = self.sampling, len(self.tokens)
        return SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k or 0,
            max_tokens=self.budget - done,
            stop_token_ids=list(self.stop_ids),
            ignore_eos=True,  # they are among the stop tokens
            seed=None if s.seed is None or s.temperature == 0 else seed_of(s.seed, self.sample_id, done),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )

    def _take(self, tokens: Sequence[int], logprobs: Any, version: int) -> None:
        given = [] if logprobs is None else logprobs.logprobs
        if len(given) != len(tokens):
            raise StageError(
                self.stage, self.sample_id, f"vLLM gave {len(given)} log-probabilities for {len(tokens)} tokens."
            )
        self.tokens += tokens
        self.logprobs += given
        self.versions += [version] * len(tokens)

    def _sample(self, reason: Literal["stop", "length"]) -> Sample:
        logprobs = np.array(self.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            first = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise StageError(
                self.stage,
                self.sample_id,
                f"The log-probability of response token {first} is {logprobs[first]}: the model's weights are broken. "
                "Check those that were loaded last.",
            )
        return Sample(
            response_ids=np.array(self.tokens, np.int32),
            logprobs=logprobs,
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
        )


def seed_of(seed: int, sample_id: str, position: int) -> int:
    """The seed of a sample's random numbers from a position on; another for each sample, on whatever replica."""
    digest = hashlib.blake2b(f"{seed}:{sample_id}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
