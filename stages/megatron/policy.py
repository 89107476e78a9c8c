"""A model that says how likely responses are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollstream.stages.base import Metric
from rollstream.stages.megatron import cpu_platform, hf_config, parallel, weights
from rollstream.stages.megatron.batch import MicroBatch, Sample, pack
from rollstream.stages.megatron.batching import SampleTooLong, at_least, micro_batches, padding_fraction
from rollstream.stages.megatron.folder import Folder, RandomFolder
from rollstream.stages.megatron.mcore import get_forward_backward_func
from rollstream.stages.megatron.model import build
from rollstream.stages.megatron.settings import MegatronConfig


class Policy:
    """This rank's part of the model that `settings` name, loaded."""

    def __init__(self, settings: MegatronConfig, *, seed: int = 0):
        self.settings = settings
        self.config = hf_config.read(Path(settings.model))
        self.chunks = build(self.config, settings)
        source = RandomFolder(self.config, seed) if settings.random_weights else Folder(self.config.folder)
        weights.load(self.chunks, self.config, source)
        self._gatherer = weights.Gatherer(self.chunks, self.config)

    def cut(self, samples: Sequence[Sample]) -> list[list[int]]:
        """The samples of each micro-batch, by index; collective: as many micro-batches on every data-parallel rank.

        Raises ValueError, naming the sample, for an empty prompt, which leaves nothing to predict the first response
        token from, and for a sample that is longer than a micro-batch or than attention looks back.
        """
        settings, window = self.settings, self.config.window
        for sample in samples:
            if not len(sample.prompt_ids):
                raise ValueError(f"sample {sample.sample_id!r} has an empty prompt; a prompt needs at least one token")
            if window is not None and sample.num_tokens > window:
                raise ValueError(
                    f"sample {sample.sample_id!r} has {sample.num_tokens} tokens; {str(self.config.folder)!r} has a "
                    f"sliding window of {window}, and longer sequences are not supported"
                )
        try:
            cut = micro_batches(
                [sample.num_tokens for sample in samples],
                max_tokens=settings.max_tokens_per_micro_batch,
                max_samples=settings.micro_batch_size,
                multiple_of=settings.layout.token_multiple,
            )
        except SampleTooLong as error:
            raise ValueError(
                f"sample {samples[error.index].sample_id!r} has {error.length} tokens, "
                f"max_tokens_per_micro_batch={settings.max_tokens_per_micro_batch} allows {error.limit}: raise it, or "
                "lower the length of prompts or responses"
            ) from error
        multiple = settings.layout.micro_batch_multiple
        most = parallel.max_over_shares(max(len(cut), 1))
        return at_least(cut, -(-most // multiple) * multiple)

    def pack(self, samples: Sequence[Sample], cut: Sequence[Sequence[int]], columns: Sequence[str]) -> list[MicroBatch]:
        """The micro-batches of a cut."""
        multiple = self.settings.layout.token_multiple
        return [pack([samples[i] for i in indices], columns, multiple_of=multiple) for indices in cut]

    def padding(self, samples: Sequence[Sample], cut: Sequence[Sequence[int]]) -> Metric:
        """(tokens that are no sample's, all tokens) of a cut."""
        lengths = [sample.num_tokens for sample in samples]
        return padding_fraction(cut, lengths, multiple_of=self.settings.layout.token_multiple)

    @torch.no_grad()
    def score(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probability of each response token, float32 [R] for each micro-batch, without gradients or dropout.

        Collective over the model's ranks, all of which get them; the number of micro-batches must suit the layout.
        """
        trained = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        scores = run_schedule(self.chunks, batches, _keep_logprobs, forward_only=True)
        for chunk, training in zip(self.chunks, trained, strict=True):
            chunk.train(training)
        if not parallel.computes_loss():
            scores = [torch.empty(len(b.labels), device=cpu_platform.device()) for b in batches]
        return [parallel.from_last_stage(values.contiguous()) for values in scores]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in Hugging Face form, as `weights.Gatherer.tensors`."""
        return self._gatherer.tensors()

    def host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of them on the host."""
        for name, tensor in self.tensors():
            yield name, tensor.to("cpu", copy=True)


def _keep_logprobs(scores: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return scores.new_zeros(()), scores[:, 0]


def run_schedule(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    loss: Callable[[Tensor, MicroBatch], tuple[Tensor, Any]],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Runs the micro-batches through the pipeline. Where the model ends, `loss` turns the scores [R, 2] of one into its
    loss and a report; gives those reports, in order, there, and nothing on other ranks. Megatron divides each loss by
    the number of micro-batches."""

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch: MicroBatch = next(iterator)

        def with_count(scores: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, report = loss(scores, batch)
            return value, torch.ones((), dtype=torch.int, device=value.device), report

        return model(batch), with_count

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=1,  # ranks tell one another the real one
        micro_batch_size=1,
        forward_only=forward_only,
    )
