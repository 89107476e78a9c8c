"""Samples packed into micro-batches: one row of tokens, sequence after sequence, no padding between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.rotary import Pack
from rollstream.stages.megatron.router_context import RouterContext


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, its response, and columns with one entry for each response token."""

    sample_id: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of its forward pass: the last one predicts nothing; 0 where there is nothing to predict."""
        return len(self.prompt_ids) + len(self.response_ids) - 1 if len(self.response_ids) else 0


@dataclass(kw_only=True)
class MicroBatch:
    """Packed samples. T tokens go in; R response tokens are predicted, those of sample 0 first.

    A sequence is prompt + response without the last token, which predicts nothing. Samples with an empty response are
    left out. What the pack lacks to a multiple of tokens is filled up behind the sequences, as one of its own.
    """

    #: [1, T], as Megatron takes them.
    input_ids: Tensor
    #: [1, T], from 0 in each sequence.
    position_ids: Tensor
    #: Where each sequence begins: on the device for attention's kernel, and (as `padded`) on the host for all others.
    packed: Pack
    #: [R] positions in T that predict the response tokens.
    rows: Tensor
    #: [R] the response tokens.
    labels: Tensor
    #: [R] the sample that each response token belongs to.
    sample_index: Tensor
    #: Per-token columns of the samples, each [R].
    columns: dict[str, Tensor]
    #: Response length of each sample, 0 included; their sum is R, but for a batch without a response token, whose one
    #: row is masked (`loss_mask` false, other columns 0): its rank takes part in every collective and adds zero.
    lengths: list[int]
    #: Tokens of each sequence.
    sequence_lengths: list[int]
    #: Tokens behind them.
    num_filler: int
    #: What routers of experts are told; None where there are none, or where nothing is trained.
    router: RouterContext | None = None


def read_samples(groups: Iterable[pa.RecordBatch], columns: Sequence[str] = ()) -> list[Sample]:
    """The rows of `groups` in order, with those per-token columns."""
    samples: list[Sample] = []
    for group in groups:
        ids = group.column("sample_id").to_pylist()
        lists = {name: _rows(group.column(name)) for name in ("prompt_ids", "response_ids", *columns)}
        samples += [
            Sample(
                sample_id=sample_id,
                prompt_ids=lists["prompt_ids"][row],
                response_ids=lists["response_ids"][row],
                columns={name: lists[name][row] for name in columns},
            )
            for row, sample_id in enumerate(ids)
        ]
    return samples


def _rows(column: pa.ListArray) -> list[np.ndarray]:
    values = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy()
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def pack(samples: Sequence[Sample], columns: Sequence[str] = (), *, multiple_of: int = 1) -> MicroBatch:
    """One micro-batch, on this rank's device, of a multiple of so many tokens; at least one, also of no samples."""
    full = [(index, sample) for index, sample in enumerate(samples) if len(sample.response_ids)]
    sequences = [np.concatenate([sample.prompt_ids, sample.response_ids[:-1]]) for _, sample in full]
    lengths = [len(sequence) for sequence in sequences]
    num_filler = -sum(lengths) % multiple_of if full else multiple_of
    if num_filler:
        sequences.append(np.zeros(num_filler, np.int64))
    sizes = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *sizes])
    bounds = torch.from_numpy(starts.astype(np.int32))
    on_device = bounds.to(cpu_platform.device())
    return MicroBatch(
        input_ids=_on_device(np.concatenate(sequences).astype(np.int64))[None],
        position_ids=_on_device(np.concatenate([np.arange(size) for size in sizes]))[None],
        packed=Pack(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=max(sizes),
            max_seqlen_kv=max(sizes),
        ),
        rows=_on_device(_joined([_predictors(s, at) for at, (_, s) in zip(starts, full, strict=False)], np.int64)),
        labels=_on_device(_joined([sample.response_ids for _, sample in full], np.int64)),
        sample_index=_on_device(_joined([np.full(len(s.response_ids), index) for index, s in full], np.int64)),
        columns={
            name: _on_device(
                _joined([s.columns[name] for _, s in full], np.bool_ if name == "loss_mask" else np.float32)
            )
            for name in columns
        },
        lengths=[len(sample.response_ids) for sample in samples],
        sequence_lengths=lengths,
        num_filler=num_filler,
    )


def _predictors(sample: Sample, start: int) -> np.ndarray:
    """Positions that predict the response of a sample whose sequence begins at `start`."""
    return start + len(sample.prompt_ids) - 1 + np.arange(len(sample.response_ids))


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """One entry after another; a single 0 where there is none."""
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(1, dtype)


def _on_device(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(cpu_platform.device())
