"""Samples packed into micro-batches: one row of tokens, sequence after sequence, no padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.mcore import PackedSeqParams


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, its response, and columns with one entry for each response token."""

    sample_id: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(kw_only=True)
class MicroBatch:
    """Packed samples. T tokens go in; R response tokens are predicted, those of sample 0 first.

    A sequence is prompt + response without the last token, which predicts nothing.
    """

    #: [1, T], as Megatron takes them.
    input_ids: Tensor
    #: [1, T], from 0 in each sequence.
    position_ids: Tensor
    #: Where each sequence begins; kept on the host, where it is read.
    packed: PackedSeqParams
    #: [R] positions in T that predict the response tokens.
    rows: Tensor
    #: [R] the response tokens.
    labels: Tensor
    #: [R] the sample that each response token belongs to.
    sample_index: Tensor
    #: Per-token columns of the samples, each [R].
    columns: dict[str, Tensor]
    #: Response length of each sample, 0 included; their sum is R, but for an `empty` batch.
    lengths: list[int]


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


def cut(samples: Sequence[Sample], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` samples, in order; the last may be smaller."""
    return [pack(samples[start : start + size]) for start in range(0, len(samples), size)]


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """One micro-batch, on this rank's device.

    Raises ValueError, naming the sample, for an empty prompt: nothing would predict the first response token.
    """
    for sample in samples:
        if not len(sample.prompt_ids):
            raise ValueError(f"sample {sample.sample_id!r} has an empty prompt; a prompt needs at least one token")
    lengths = [len(sample.response_ids) for sample in samples]
    if not any(lengths):
        return empty(tuple(samples[0].columns), lengths)
    return _packed([(index, sample) for index, sample in enumerate(samples) if lengths[index]], lengths)


def empty(columns: Sequence[str], lengths: Sequence[int] = ()) -> MicroBatch:
    """A micro-batch without response tokens: one token, predicted and masked (`loss_mask` false, other columns 0).

    Its rank takes part in every collective and adds zero.
    """
    filler = Sample(
        sample_id="",
        prompt_ids=np.zeros(1, np.int64),
        response_ids=np.zeros(1, np.int64),
        columns={name: np.zeros(1, np.bool_ if name == "loss_mask" else np.float32) for name in columns},
    )
    return _packed([(0, filler)], lengths)


def _packed(full: Sequence[tuple[int, Sample]], lengths: Sequence[int]) -> MicroBatch:
    sequences = [np.concatenate([sample.prompt_ids, sample.response_ids[:-1]]) for _, sample in full]
    sizes = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *sizes])
    rows = [
        start + len(sample.prompt_ids) - 1 + np.arange(len(sample.response_ids))
        for start, (_, sample) in zip(starts[:-1], full, strict=True)
    ]
    bounds = torch.from_numpy(starts.astype(np.int32))
    columns = {
        name: _on_device(np.concatenate([sample.columns[name] for _, sample in full])) for name in full[0][1].columns
    }
    return MicroBatch(
        input_ids=_on_device(np.concatenate(sequences).astype(np.int64))[None],
        position_ids=_on_device(np.concatenate([np.arange(size) for size in sizes]))[None],
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(sizes),
            max_seqlen_kv=max(sizes),
        ),
        rows=_on_device(np.concatenate(rows)),
        labels=_on_device(np.concatenate([sample.response_ids for _, sample in full]).astype(np.int64)),
        sample_index=_on_device(np.concatenate([np.full(len(s.response_ids), index) for index, s in full])),
        columns=columns,
        lengths=list(lengths),
    )


def _on_device(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(cpu_platform.device())
