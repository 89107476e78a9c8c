"""The engine inside transformers: its `generate`, in this process, a batch of prompts at a time.

    requests -> checked, cut into batches that may grow by the same number of tokens
    batch    -> left-padded prompts run once -> cache repeated for the samples -> generate with `Sampler`
             -> rows cut at their stop token -> Samples

All groups of a batch come out when its longest sample has ended; weights are replaced between batches.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessorList

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.engine import Request, Sample, Sampling
from rollstream.stages.rollout.hf_weights import copy_weights
from rollstream.stages.rollout.sampler import Sampler


class TransformersEngine:
    """Generates with the causal language model of folder `model`, on the GPU where there is one.

    `dtype` is "float32" or "bfloat16"; logits are float32 either way. `stage` is the name that errors carry. The
    folder's generation settings are not used, but for their end-of-sequence tokens: a repetition penalty, say, would
    make samples that the trainer's probabilities do not describe.
    """

    def __init__(self, model: str, *, dtype: str, stage: str):
        self._stage = stage
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model.eval().to(self._device)
        config = self._model.config.get_text_config()
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._eos_ids = _eos_ids(self._model.generation_config, config)
        self._model.generation_config = GenerationConfig()
        self._version = 0
        # The argument's name differs between releases of transformers.
        known = inspect.signature(self._model.prepare_inputs_for_generation).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[str, list[Sample]]]:
        """See `Engine.generate`."""
        batches: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            batches[self._budget(request, sampling.max_tokens)].append(request)
        for budget, batch in batches.items():
            yield from self._generate_batch(batch, sampling, budget)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """See `Engine.load_weights`."""
        faults = copy_weights(self._model, tensors)
        if faults:
            raise StageError(self._stage, f"weights of version {version}", "\n".join(faults))
        self._version = version

    def close(self) -> None:
        """See `Engine.close`."""
        self._model = None

    def _budget(self, request: Request, max_tokens: int) -> int:
        """Tokens that the response may have; raises StageError for a prompt that the model cannot take."""
        ids, limit = request.prompt_ids, self._max_positions
        bad = [i for i in ids if not 0 <= i < self._vocabulary]
        if not len(ids):
            fault = "A prompt must have at least one token, got none."
        elif bad:
            fault = (
                f"Prompt token ids must be from 0 to {self._vocabulary - 1}, got {bad[:5]}: is it another tokenizer's?"
            )
        elif limit is not None and len(ids) >= limit:
            fault = f"A prompt must be shorter than the model's context of {limit} tokens, got {len(ids)}."
        else:
            return max_tokens if limit is None else min(max_tokens, limit - len(ids))
        raise StageError(self._stage, f"group {request.group_id}", fault)

    @torch.inference_mode()
    def _generate_batch(self, batch: list[Request], sampling: Sampling, budget: int) -> list[tuple[str, list[Sample]]]:
        repeats = torch.tensor([len(r.sample_ids) for r in batch], device=self._device)
        prompts, mask = self._pad([r.prompt_ids for r in batch])
        sample_ids = [i for r in batch for i in r.sample_ids]
        sampler = Sampler(sample_ids, sampling, max_tokens=budget, stage=self._stage, device=self._device)
        stop_ids = sorted({*self._eos_ids, *sampling.stop_token_ids})
        self._model.generate(
            prompts.repeat_interleave(repeats, 0),
            attention_mask=mask.repeat_interleave(repeats, 0),
            generation_config=GenerationConfig(
                max_new_tokens=budget, do_sample=False, use_cache=True, eos_token_id=stop_ids or None, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([sampler]),
            **self._prefilled(prompts, mask, repeats),
        )
        samples = iter(_cut(*sampler.result(), stop_ids, self._version))
        return [(r.group_id, [next(samples) for _ in r.sample_ids]) for r in batch]

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [rows, longest prompt], padded on the left."""
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return ids.to(self._device), mask.to(self._device)

    def _prefilled(self, prompts: Tensor, mask: Tensor, repeats: Tensor) -> dict[str, DynamicCache]:
        """Cache of all prompt tokens but the last, computed once a prompt and repeated for its samples.

        `generate` runs the last token itself: its logits give the first token of the response.
        """
        if prompts.shape[1] == 1:
            return {}
        ids, mask = prompts[:, :-1], mask[:, :-1]
        cache = DynamicCache(config=self._model.config)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        self._model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
        )
        rows = torch.arange(len(repeats), device=self._device).repeat_interleave(repeats)
        cache.batch_select_indices(rows)
        return {self._cache_argument: cache}


def _eos_ids(generation_config: GenerationConfig, config: Any) -> frozenset[int]:
    """End-of-sequence tokens: the generation settings' where they name any, else the model's."""
    ids = getattr(generation_config, "eos_token_id", None)
    ids = getattr(config, "eos_token_id", None) if ids is None else ids
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def _cut(tokens: Tensor, logprobs: Tensor, stop_ids: list[int], version: int) -> Iterator[Sample]:
    """Each row up to and with its first stop token."""
    stops = np.isin(tokens.numpy(), stop_ids)
    for row_tokens, row_logprobs, row_stops in zip(tokens.numpy(), logprobs.numpy(), stops, strict=True):
        stopped = bool(row_stops.any())
        length = int(row_stops.argmax()) + 1 if stopped else len(row_tokens)
        yield Sample(
            response_ids=row_tokens[:length].astype(np.int32),
            logprobs=row_logprobs[:length].astype(np.float32),
            versions=np.full(length, version, np.int32),
            finish_reason="stop" if stopped else "length",
        )
