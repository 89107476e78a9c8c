"""What a generation engine is: token ids in, token ids with log-probabilities out, weights in.

Request (a prompt, the ids of its samples)  --submit-->  ...  --finished-->  (request id, its samples), as each ends
(version, named arrays)                     --load_weights-->  used for every token that is sampled from then on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rollstream.stages.errors import StalledError


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
    #: With the sample's id, fixes the random numbers of the sample; None: the engine's own, other ones in each process.
    seed: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the samples wanted of it, one for each of `sample_ids`."""

    #: Names the request in what comes back, and in errors.
    request_id: str
    prompt_ids: Sequence[int]
    sample_ids: Sequence[str]
    sampling: Sampling


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
    #: bool [T]: true at what the policy sampled, false at what was said in between (log-probability 0); None: all true.
    loss_mask: npt.NDArray[np.bool_] | None = None

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """`loss_mask`, whole."""
        return np.ones(len(self.response_ids), np.bool_) if self.loss_mask is None else self.loss_mask


class Engine(Protocol):
    """Generates with weights that may be replaced between, or where an engine can, during its requests.

    The smallest engine, which says nothing:

        class Mute:
            continuous = False
            def __init__(self): self.ended = []
            def submit(self, r):
                mute = Sample(response_ids=np.array([2], np.int32), logprobs=np.zeros(1, np.float32),
                              versions=np.zeros(1, np.int32), finish_reason="stop")
                self.ended.append((r.request_id, [mute] * len(r.sample_ids)))
            def finished(self, timeout_s): return self.ended.pop() if self.ended else None
            def load_weights(self, version, tensors): ...
            def close(self): ...
    """

    #: Whether requests may be submitted, and weights loaded, while others are generated from. Otherwise all that was
    #: submitted is generated from as one batch, once `finished` is called.
    continuous: bool

    def submit(self, request: Request) -> None:
        """Takes a request in.

        Raises StageError naming it for an empty prompt, a token id outside the vocabulary and a prompt that fills the
        model's context. A response that would outgrow the context ends early with finish reason "length".
        """
        ...

    def finished(self, timeout_s: float) -> tuple[str, list[Sample]] | None:
        """(request_id, samples in the order of sample_ids) of the request that ended next; None where none did in time.

        Raises StageError naming a sample whose logits are not finite, and EngineDied.
        """
        ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Replaces all weights by arrays in Hugging Face names.

        Raises StageError listing names that are unknown, missing or of another shape, and EngineDied.
        """
        ...

    def close(self) -> None:
        """Frees the model, and ends the engine's processes."""
        ...


@runtime_checkable
class Rests(Protocol):
    """An engine that can give its device's memory back."""

    def rest(self) -> None:
        """Gives it back until new weights come. Nothing may be under way."""
        ...


def generate(
    engine: Engine, requests: Sequence[Request], *, timeout_s: float = 600.0
) -> Iterator[tuple[str, list[Sample]]]:
    """What comes of these requests and no others, as they end. Raises StalledError where none ends for `timeout_s`."""
    for request in requests:
        engine.submit(request)
    for _ in requests:
        done = engine.finished(timeout_s)
        if done is None:
            raise StalledError(f"no request ended in {timeout_s:g} s")
        yield done
