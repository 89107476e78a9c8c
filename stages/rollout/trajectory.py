"""What a rollout function is given, and what it returns: a prompt, and a response made of turns and of what was said
between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollstream.stages.rollout.engine import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """What one sample begins with, and its limits."""

    sample_id: str
    #: The tokens that the model sees, and their text.
    ids: tuple[int, ...]
    text: str
    #: The answer column and the further columns of the data, decoded; each sample has copies of its own.
    target: Any
    meta: dict[str, Any]
    #: Tokens of the whole response at most, turns and what is said between them; the model's context is heeded.
    max_tokens: int
    #: Turns of the policy at most.
    max_turns: int


class Trajectory:
    """A response as it grows: token ids, each either sampled by the policy or said by something else.

        trajectory = Trajectory(prompt)
        await engine.turn(trajectory)            # the policy's: in the loss, with its log-probabilities and versions
        engine.say(trajectory, "so it is 7\\n")   # a tool's: not in the loss
        trajectory.done                          # True: no further turn fits

    Tokens are only ever appended. What was sampled is never decoded and encoded again, so the trainer sees the very
    tokens that the engine saw.
    """

    def __init__(self, prompt: Prompt):
        self.prompt = prompt
        self.num_turns = 0
        #: Of the last turn; "length" also where words were said that left no room. None before the first turn.
        self.finish_reason: Literal["stop", "length"] | None = None
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    @property
    def ids(self) -> list[int]:
        """All tokens so far, the prompt's too: what the next turn is drawn from."""
        return [*self.prompt.ids, *self._ids]

    @property
    def response_ids(self) -> list[int]:
        """The tokens behind the prompt."""
        return list(self._ids)

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        return self.prompt.max_tokens - len(self._ids)

    @property
    def done(self) -> bool:
        """Whether its tokens or its turns are used up."""
        return self.room <= 0 or self.num_turns >= self.prompt.max_turns

    def add_turn(self, turn: Sample) -> None:
        """Appends what the policy sampled from `ids`."""
        self._append(turn.response_ids.tolist(), True, turn.logprobs.tolist(), turn.versions.tolist())
        self.num_turns += 1
        self.finish_reason = turn.finish_reason

    def add_words(self, ids: Sequence[int], version: int) -> None:
        """Appends what the policy did not sample, cut where there is no more room. Log-probabilities are 0; the version
        is that of the token before, or `version` where there is none."""
        kept = list(ids[: self.room])
        before = self._versions[-1] if self._versions else version
        self._append(kept, False, [0.0] * len(kept), [before] * len(kept))
        if kept and self.room == 0:
            self.finish_reason = "length"

    def sample(self) -> Sample:
        """It as a row of the rollout. Raises ValueError where the policy had no turn."""
        if self.finish_reason is None or not any(self._sampled):
            raise ValueError("a rollout function must let the policy speak: call engine.turn(trajectory) once at least")
        return Sample(
            response_ids=np.array(self._ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            finish_reason=self.finish_reason,
            loss_mask=np.array(self._sampled, np.bool_),
        )

    def _append(self, ids: list[int], sampled: bool, logprobs: list[float], versions: list[int]) -> None:
        self._ids += ids
        self._sampled += [sampled] * len(ids)
        self._logprobs += logprobs
        self._versions += versions
