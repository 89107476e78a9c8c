"""Attention over a pack: equal to plain softmax attention, and no sequence sees another, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron import layers, parallel
from rollstream.stages.megatron.batch import Sample, pack
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layers import attend_at_once, attend_by_runs, fits_varlen, repeat_heads
from rollstream.stages.megatron.policy import Policy

pytestmark = pytest.mark.megatron

#: Runs of one length, lengths that come back later, a single token, and lengths around the kernels' blocks.
PACKS = {
    "equal": [9] * 6,
    "falling": [300, 65, 64, 64, 33, 32, 32, 7, 7, 7, 1, 1],
    "mixed": [5, 3, 5, 5, 1, 3, 129],
    "one": [40],
    "one token": [1],
}
HEADS = {"4 of 4": (4, 4, 12), "4 of 2": (4, 2, 16), "14 of 2": (14, 2, 64), "9 of 3": (9, 3, 8)}


def tensors(lengths: list[int], heads: tuple[int, int, int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, size = heads
    shapes = [(sum(lengths), count, size) for count in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def plain(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """softmax(scale * q k) v of each query on its own, in float64."""
    groups, rows = query.shape[1] // key.shape[1], []
    query, key, value = query.double(), key.double(), value.double()
    for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        for at in range(start, start + length):
            heads = []
            for head in range(query.shape[1]):
                keys, values = key[start : at + 1, head // groups], value[start : at + 1, head // groups]
                heads.append((scale * keys @ query[at, head]).softmax(0) @ values)
            rows.append(torch.cat(heads))
    return torch.stack(rows)


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum with a different weight for each number."""
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("heads", [HEADS["4 of 4"], HEADS["4 of 2"], HEADS["9 of 3"]], ids=str)
@pytest.mark.parametrize("lengths", [[5, 3, 5, 5, 1, 3, 20], [6, 6, 6], [1]], ids=str)
def test_agrees_with_plain_attention(lengths: list[int], heads: tuple[int, int, int]) -> None:
    inputs = tensors(lengths, heads)
    out, wanted = attend_by_runs(*inputs, lengths, 0.3), plain(*inputs, lengths, 0.3)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)
    for found, right in zip(gradients(out, inputs), gradients(wanted, inputs), strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_a_pack_is_exactly_its_sequences_one_by_one(lengths: list[int], heads: tuple[int, int, int]) -> None:
    inputs = tensors(lengths, heads)
    out = attend_by_runs(*inputs, lengths, None)
    parts = zip(*(x.split(lengths) for x in inputs), lengths, strict=True)
    alone = torch.cat([attend_by_runs(q, k, v, [length], None) for q, k, v, length in parts])
    assert torch.equal(out, alone)
    for found, right in zip(gradients(out, inputs), gradients(alone, inputs), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("changed", [0, 3, 6])
def test_values_of_a_sequence_reach_no_other(changed: int) -> None:
    lengths, heads = PACKS["mixed"], HEADS["4 of 2"]
    before = tensors(lengths, heads)
    after = [x.detach().clone() for x in before]
    for x in after:
        x.split(lengths)[changed].fill_(math.nan)  # even times zero it would show
    outs = [attend_by_runs(*inputs, lengths, None).split(lengths) for inputs in (before, after)]
    for index, (old, new) in enumerate(zip(*outs, strict=True)):
        assert torch.equal(old, new) == (index != changed)


def meaning_of_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """What torch documents of its kernel, which runs on CUDA only."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert options["window_size"] == (-1, 0)
    assert query.shape[1] == key.shape[1] or options.get("enable_gqa", True)
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    return plain(query, key, value, lengths, options["scale"]).reshape(query.shape).float()


@pytest.mark.parametrize("names_groups", [True, False])
def test_one_kernel_for_the_pack_is_told_the_same(monkeypatch: pytest.MonkeyPatch, names_groups: bool) -> None:
    lengths = [5, 3, 3, 1]
    inputs = tensors(lengths, HEADS["4 of 2"])
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    told: dict[str, Any] = {}

    def kernel(*args: Any, **given: Any) -> Tensor:
        told.update(given)
        return meaning_of_varlen(*args, **given)

    monkeypatch.setattr(layers, "_varlen", lambda: (kernel, names_groups))
    out = attend_at_once(*inputs, bounds, max(lengths), 0.3)
    torch.testing.assert_close(out, attend_by_runs(*inputs, lengths, 0.3), atol=1e-5, rtol=0)
    assert ("enable_gqa" in told) == names_groups


def test_torch_has_the_kernel_that_we_call() -> None:
    kernel, names_groups = layers._varlen()
    query, key, value = (x.detach() for x in tensors([4], HEADS["4 of 2"]))
    options = {"enable_gqa": True} if names_groups else {}
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    query, key, value, bounds = (x.to("meta") for x in (query, key, value, bounds))
    out = kernel(query, key, value, bounds, bounds, 4, 4, scale=0.3, window_size=(-1, 0), **options)
    assert out.shape == query.shape


def test_repeated_heads_are_those_of_their_group() -> None:
    inputs = tensors([20, 7], HEADS["9 of 3"])
    query, key, value = inputs
    out = attend_by_runs(query, repeat_heads(key, 9), repeat_heads(value, 9), [20, 7], None)
    torch.testing.assert_close(out, attend_by_runs(*inputs, [20, 7], None), atol=1e-6, rtol=0)
    assert repeat_heads(query, 9) is query


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "fits"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.float16, 256, (8, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 12, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
    ],
)
def test_kernel_is_left_out_where_it_refuses(
    dtype: torch.dtype, size: int, capability: tuple[int, int], fits: bool
) -> None:
    assert fits_varlen(torch.empty(3, 4, size, dtype=dtype), capability) == fits


def samples(lengths: list[int], changed: int | None = None, vocab: int = 131) -> list[Sample]:
    """Prompts of 4 tokens with responses of these lengths; one sample may have other tokens throughout."""
    rng = np.random.default_rng(5)
    made = [Sample(sample_id=f"s{n}", prompt_ids=rng.integers(0, vocab, 4), response_ids=rng.integers(0, vocab, n))
            for n in lengths]  # fmt: skip
    if changed is not None:
        prompt, response = made[changed].prompt_ids, made[changed].response_ids
        made[changed] = dataclasses.replace(
            made[changed], prompt_ids=(prompt + 1) % vocab, response_ids=(response + 1) % vocab
        )
    return made


@on_platform()
def scores(world: World, folder: Path, packs: list[list[Sample]]) -> list[list[np.ndarray]]:
    """Log-probabilities of each sample of each pack."""
    config = RefLogprob.Config(model=str(folder), temperature=0.7)
    parallel.init(world, config.layout, seed=0)
    policy = Policy(config)
    batches = [pack(one) for one in packs]
    flat = [policy.score([batch])[0].numpy() for batch in batches]
    return [np.split(values, np.cumsum(b.lengths)[:-1]) for values, b in zip(flat, batches, strict=True)]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_sample_changes_no_other_in_a_whole_model(launch: Any, tiny: Any, kind: str) -> None:
    lengths = [60, 20, 20, 20, 9, 9, 1]
    packs = [samples(lengths), *(samples(lengths, changed) for changed in range(len(lengths)))]
    before, *after = launch(1, scores, tiny(kind), packs)[0]
    for changed, found in enumerate(after):
        assert [np.array_equal(a, b) for a, b in zip(before, found, strict=True)] == [
            index != changed for index in range(len(lengths))
        ]


def test_order_of_a_pack_changes_no_sample(launch: Any, tiny: Any) -> None:
    made = samples([60, 20, 20, 20, 9, 9, 1])
    falling, other = launch(1, scores, tiny("qwen2"), [made, made[::-1]])[0]
    assert all(np.array_equal(a, b) for a, b in zip(falling, other[::-1], strict=True))
