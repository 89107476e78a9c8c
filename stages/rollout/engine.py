"""What a generation engine is: token ids in, token ids with log-probabilities out, weights in.

Request (a prompt, the ids of its samples)  --generate-->  Sample, Sample, ...    a group at a time, as each ends
(version, named arrays)                     --load_weights-->  used by what is generated from then on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    #: Logits are divided by it; 0 takes the likeliest token.
    temperature: float = 1.0
    #: Draw from the fewest tokens whose probabilities reach this sum.
    top_p: float = 1.0
    #: Draw from this many likeliest tokens; None draws from all.
    top_k: int | None = None
    #: Tokens of a response at most, the stop token counted.
    max_tokens: int
    #: Tokens that end a response, besides the model's own end-of-sequence tokens.
    stop_token_ids: tuple[int, ...] = ()
    #: With the sample's id, fixes the random numbers of the sample.
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the samples wanted of it, one for each of `sample_ids`."""

    group_id: str
    prompt_ids: Sequence[int]
    sample_ids: Sequence[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A response of T tokens; a sampled stop token is its last one."""

    #: int32 [T]
    response_ids: npt.NDArray[np.int32]
    #: float32 [T]: log-softmax of logits / temperature at each token, before top-p and top-k. At temperature 0 the
    #: logits are not divided.
    logprobs: npt.NDArray[np.float32]
    #: int32 [T]: version of the weights that sampled each token.
    versions: npt.NDArray[np.int32]
    #: "stop": a stop token was sampled; "length": max_tokens or the model's context was used up.
    finish_reason: Literal["stop", "length"]


class Engine(Protocol):
    """Generates with weights that may be replaced between, or where an engine can, during its requests.

    The smallest engine, which says nothing:

        class Mute:
            def generate(self, requests, sampling):
                for r in requests:
                    yield r.group_id, [Sample(response_ids=np.array([2], np.int32), logprobs=np.zeros(1, np.float32),
                                              versions=np.zeros(1, np.int32), finish_reason="stop")] * len(r.sample_ids)
            def load_weights(self, version, tensors): ...
            def close(self): ...
    """

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[str, list[Sample]]]:
        """(group_id, samples in the order of sample_ids) of each request, in the order in which they end.

        Raises StageError naming the group for an empty prompt, a token id outside the vocabulary, a prompt that fills
        the model's context, and logits that are not finite. A response that would outgrow the context ends early with
        finish reason "length".
        """
        ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Replaces all weights by arrays in Hugging Face names.

        Raises StageError listing names that are unknown, missing or of another shape.
        """
        ...

    def close(self) -> None:
        """Frees the model."""
        ...
