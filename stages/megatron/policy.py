"""A model that says how likely responses are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rollstream.stages.megatron import hf_config, weights
from rollstream.stages.megatron.batch import MicroBatch
from rollstream.stages.megatron.logprob import token_logprobs
from rollstream.stages.megatron.model import build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """The model in `folder`, loaded onto this rank; `temperature` divides the logits wherever it is asked."""

    def __init__(self, folder: str, *, dtype: str, temperature: float):
        self.config = hf_config.read(Path(folder))
        self.temperature = temperature
        self.model = build(self.config, DTYPES[dtype])
        weights.load(self.model, self.config)

    def logprobs(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability of each response token, and the entropy where it was drawn; float32 [R] each."""
        return token_logprobs(logits, batch.labels, temperature=self.temperature, vocab_size=self.config.vocab_size)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> Tensor:
        """Log-probability of each response token, float32 [R], without gradients; collective over the model's ranks."""
        return self.logprobs(self.model(batch), batch)[0]
