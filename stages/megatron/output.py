"""The output layer: from hidden states to log-probabilities, without ever holding the logits of a long batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollstream.stages.megatron.logprob import token_logprobs
from rollstream.stages.megatron.mcore import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

#: Logits that exist at a time at most, in numbers of this rank's part of the vocabulary, by the kind of device: a CPU
#: makes passes over them in float32.
MAX_LOGITS = {"cpu": 1 << 27, "cuda": 1 << 29}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the next forward pass is to score."""

    #: [R] positions in the pack that predict the labels.
    rows: Tensor
    #: [R]
    labels: Tensor
    temperature: float
    #: Vocabulary without its padding.
    vocab_size: int


class ScoringLayer(ColumnParallelLinear):
    """Megatron's output layer whose forward gives [R, 1, 2], log-probability and entropy of what is `wanted`.

    Rows are taken in chunks of at most MAX_LOGITS logits; with gradients, a chunk's logits are made once more in the
    backward pass. Without anything wanted it gives logits of all positions.
    """

    wanted: Wanted | None

    @classmethod
    def take_over(cls, layer: ColumnParallelLinear) -> None:
        """Makes an output layer one of this class; its parameters stay as they are."""
        layer.__class__ = cls
        layer.wanted = None  # type: ignore[attr-defined]
        layer.gathers_tokens = layer.sequence_parallel  # type: ignore[attr-defined]
        # The hidden states are brought to all ranks once, for all chunks, and so are their gradients.
        layer.sequence_parallel = layer.allreduce_dgrad = False
        layer.disable_grad_reduce = True

    def forward(self, input_: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if self.gathers_tokens:
            hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            return super().forward(hidden, weight)[0], None
        hidden = hidden.index_select(0, wanted.rows)
        size = max(1, MAX_LOGITS[hidden.device.type] // self.output_size_per_partition)
        if len(hidden) <= size:
            return self._score(hidden, wanted.labels, weight, wanted), None
        parts = [
            checkpoint(self._score, part, labels, weight, wanted, use_reentrant=False, preserve_rng_state=False)
            for part, labels in zip(hidden.split(size), wanted.labels.split(size), strict=True)
        ]
        return torch.cat(parts), None

    def _score(self, hidden: Tensor, labels: Tensor, weight: Tensor | None, wanted: Wanted) -> Tensor:
        logits = super().forward(hidden, weight)[0][:, 0]
        scores = token_logprobs(logits, labels, temperature=wanted.temperature, vocab_size=wanted.vocab_size)
        return torch.stack(scores, -1)[:, None]
