"""Draws the next token of every row of a batch, and records it with its log-probability."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.draws import uniforms
from rollstream.stages.rollout.engine import Sampling


class Sampler:
    """A logits processor for `generate(do_sample=False)`: leaves the drawn token alone finite, so that argmax takes it.

    `generate` has its own sampling, from one random stream for the whole batch. Here each sample has its own numbers,
    so that a sample's tokens depend neither on its neighbours nor on their order (up to ties within rounding).

    The log-probability kept is log_softmax(logits / temperature) over the whole vocabulary, in float32, before top-k
    and top-p: what a trainer computes from the logits again.
    """

    def __init__(
        self, sample_ids: Sequence[str], sampling: Sampling, *, max_tokens: int, stage: str, device: torch.device
    ):
        self._sample_ids, self._sampling, self._stage = sample_ids, sampling, stage
        self._uniforms: Tensor | None = None
        if sampling.temperature > 0:
            assert sampling.seed is not None, "the engine chooses one where the user does not"
            self._uniforms = torch.from_numpy(uniforms(sampling.seed, sample_ids, max_tokens)).to(device)
        self._filters: list[LogitsProcessor] = []
        if sampling.top_k is not None:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` are logits, float32 [rows, vocabulary]; so is what is returned."""
        if self._uniforms is not None:
            scores = scores / self._sampling.temperature
        normalizer = scores.logsumexp(dim=-1)
        self._check_finite(normalizer)
        if self._uniforms is None:
            tokens = scores.argmax(dim=-1)
        else:
            tokens = self._draw(input_ids, scores, self._uniforms[:, len(self._tokens)])
        self._tokens.append(tokens)
        self._logprobs.append(scores.gather(1, tokens[:, None])[:, 0] - normalizer)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def result(self) -> tuple[Tensor, Tensor]:
        """Tokens (int64) and log-probabilities (float32) of all steps, [rows, steps], on the host.

        Rows that have ended go on being drawn until the last one ends: cut them at their stop token.
        """
        return torch.stack(self._tokens, dim=1).cpu(), torch.stack(self._logprobs, dim=1).cpu()

    def _draw(self, input_ids: Tensor, scores: Tensor, numbers: Tensor) -> Tensor:
        """Each row's first token at which the sum of probabilities passes its number: the inverse of their sum."""
        for keep in self._filters:
            scores = keep(input_ids, scores)  # type: ignore[arg-type]
        sums = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]

    def _check_finite(self, normalizer: Tensor) -> None:
        """A NaN or +inf anywhere in a row's logits makes its log-sum NaN or infinite."""
        bad = ~torch.isfinite(normalizer)
        if bad.any():
            row = int(bad.nonzero()[0, 0])
            raise StageError(
                self._stage,
                self._sample_ids[row],
                f"The logits for response token {len(self._tokens)} hold NaN or infinity: the model's weights are "
                "broken. Check those that were loaded last.",
            )
