"""The engine inside transformers: its `generate`, in this process, a batch of prompts at a time.

    requests -> checked; those drawn in one way that fit in the model's context together are a batch
    batch    -> left-padded prompts run once -> cache repeated for the samples -> generate with `Sampler`
             -> rows cut at their stop token or their own length -> Samples

All groups of a batch come out when its longest sample has ended; weights are replaced between batches.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.engine import Request, Sample, Sampling
from rollstream.stages.rollout.hf_weights import copy_weights
from rollstream.stages.rollout.model_limits import ModelLimits
from rollstream.stages.rollout.sampler import Sampler


class TransformersEngine:
    """Generates with the causal language model of folder `model`, on the GPU where there is one.

    `dtype` is "float32" or "bfloat16"; logits are float32 either way. `stage` is the name that errors carry. The
    folder's generation settings are not used, but for their end-of-sequence tokens: a repetition penalty, say, would
    make samples that the trainer's probabilities do not describe.
    """

    continuous = False

    def __init__(self, model: str, *, dtype: str, stage: str):
        self._stage = stage
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model.eval().to(self._device)
        self._limits = ModelLimits.of(model)
        self._model.generation_config = GenerationConfig()
        self._version = 0
        self._free_seed = secrets.randbits(48)
        self._waiting: list[tuple[Request, int]] = []  # with the tokens that a response may have
        self._ended: deque[tuple[str, list[Sample]]] = deque()
        # The argument's name differs between releases of transformers.
        known = inspect.signature(self._model.prepare_inputs_for_generation).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        self._waiting.append((request, self._limits.budget(request, self._stage)))

    def finished(self, timeout_s: float) -> tuple[str, list[Sample]] | None:
        """See `Engine.finished`: generates from the next batch of what waits, however long that takes."""
        if not self._ended and self._waiting:
            batch = self._next_batch()
            self._ended.extend(self._generate_batch([r for r, _ in batch], [budget for _, budget in batch]))
        return self._ended.popleft() if self._ended else None

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """See `Engine.load_weights`."""
        self._model.to(self._device)
        faults = copy_weights(self._model, tensors)
        if faults:
            raise StageError(self._stage, f"weights of version {version}", "\n".join(faults))
        self._version = version

    def rest(self) -> None:
        """See `Rests.rest`: the weights wait in host memory."""
        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """See `Engine.close`."""
        self._model = None

    def _next_batch(self) -> list[tuple[Request, int]]:
        """What is generated from next, with its budgets: the first that waits, and all that go with it. Rows that have
        ended are carried on until the last one ends, and must not outgrow the context meanwhile."""
        batch: list[tuple[Request, int]] = []
        others: list[tuple[Request, int]] = []
        kind, context = _kind(self._waiting[0][0].sampling), self._limits.context
        longest = most = 0
        for request, budget in self._waiting:
            length, growth = max(longest, len(request.prompt_ids)), max(most, budget)
            if _kind(request.sampling) == kind and (not batch or context is None or length + growth <= context):
                batch.append((request, budget))
                longest, most = length, growth
            else:
                others.append((request, budget))
        self._waiting = others
        return batch

    @torch.inference_mode()
    def _generate_batch(self, batch: list[Request], budgets: list[int]) -> list[tuple[str, list[Sample]]]:
        sampling, most = batch[0].sampling, max(budgets)
        limits = [budget for r, budget in zip(batch, budgets, strict=True) for _ in r.sample_ids]
        repeats = torch.tensor([len(r.sample_ids) for r in batch], device=self._device)
        prompts, mask = self._pad([r.prompt_ids for r in batch])
        sample_ids = [i for r in batch for i in r.sample_ids]
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=self._free_seed)
        sampler = Sampler(sample_ids, sampling, max_tokens=most, stage=self._stage, device=self._device)
        stop_ids = sorted({*self._limits.eos_ids, *sampling.stop_token_ids})
        self._model.generate(
            prompts.repeat_interleave(repeats, 0),
            attention_mask=mask.repeat_interleave(repeats, 0),
            generation_config=GenerationConfig(
                max_new_tokens=most, do_sample=False, use_cache=True, eos_token_id=stop_ids or None, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([_OwnLength(prompts.shape[1], limits, self._device)]),
            **self._prefilled(prompts, mask, repeats),
        )
        samples = iter(_cut(*sampler.result(), limits, stop_ids, self._version))
        return [(r.request_id, [next(samples) for _ in r.sample_ids]) for r in batch]

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


def _kind(sampling: Sampling) -> Sampling:
    """Requests of one kind may be generated from together."""
    return dataclasses.replace(sampling, max_tokens=1)


class _OwnLength(StoppingCriteria):
    """Each row ends at its own number of tokens; they begin at `start`."""

    def __init__(self, start: int, limits: list[int], device: torch.device):
        self._ends = start + torch.tensor(limits, device=device)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self._ends


def _cut(tokens: Tensor, logprobs: Tensor, limits: list[int], stop_ids: list[int], version: int) -> Iterator[Sample]:
    """Each row up to and with its first stop token, or to its own limit."""
    stops = np.isin(tokens.numpy(), stop_ids)
    for row_tokens, row_logprobs, row_stops, limit in zip(tokens.numpy(), logprobs.numpy(), stops, limits, strict=True):
        stopped = bool(row_stops[:limit].any())
        length = int(row_stops.argmax()) + 1 if stopped else min(limit, len(row_tokens))
        yield Sample(
            response_ids=row_tokens[:length].astype(np.int32),
            logprobs=row_logprobs[:length].astype(np.float32),
            versions=np.full(length, version, np.int32),
            finish_reason="stop" if stopped else "length",
        )
