"""The engine as a rollout function sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollstream.stages.rollout.engine import Sample
from rollstream.stages.rollout.trajectory import Trajectory


class TurnEngine:
    """Draws turns and appends them; one for each sample. Made by the stage.

    `draw(token_ids, max_tokens)` is the way to the engine. What a function says may be text or token ids; text is
    encoded as it stands, and names of special tokens in it become those tokens: clean what comes from outside.
    """

    def __init__(
        self,
        draw: Callable[[Sequence[int], int], Awaitable[Sample]],
        *,
        tokenizer: Any,
        vocabulary: int,
        max_turn_tokens: int | None,
        version: Callable[[], int],
    ):
        self._draw, self._tokenizer, self._version = draw, tokenizer, version
        self._vocabulary, self._max_turn_tokens = vocabulary, max_turn_tokens

    async def turn(self, trajectory: Trajectory, *, max_tokens: int | None = None) -> str:
        """Lets the policy go on from exactly the tokens so far, and appends what it samples; gives its text, without
        special tokens.

        It ends with a stop token, or after `max_tokens`, the stage's `max_turn_tokens` or the trajectory's room,
        whichever is least: `trajectory.finish_reason` tells. Raises RuntimeError if the trajectory is done.
        """
        if trajectory.done:
            raise RuntimeError(
                f"the trajectory is done, with {trajectory.num_turns} of {trajectory.prompt.max_turns} turns "
                f"(max_turns) and room for {trajectory.room} tokens (max_tokens, the model's context): look at "
                "trajectory.done before each turn"
            )
        limits = [n for n in (max_tokens, self._max_turn_tokens, trajectory.room) if n is not None]
        turn = await self.generate(trajectory.ids, max_tokens=min(limits))
        trajectory.add_turn(turn)
        return self.decode(turn.response_ids.tolist())

    def say(self, trajectory: Trajectory, words: str | Sequence[int]) -> None:
        """Appends what a tool, a user or the function itself says: it is read by the policy, and not trained on. What
        does not fit in the trajectory's room is cut off, and ends it. Raises ValueError for ids that are no tokens."""
        ids = self.encode(words) if isinstance(words, str) else words
        bad = [i for i in ids if not 0 <= i < self._vocabulary]
        if bad:
            raise ValueError(f"token ids must be from 0 to {self._vocabulary - 1}, got {bad[:5]}")
        trajectory.add_words(ids, self._version())

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int) -> Sample:
        """Samples from any tokens, for what is no part of a trajectory: a summary, a judgement."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        return await self._draw(token_ids, max_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, and no others around them."""
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens, without special ones."""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
