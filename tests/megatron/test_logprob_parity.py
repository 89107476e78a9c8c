"""Logits and log-probabilities agree with transformers: every architecture, tied and untied, whole and cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import distributed as dist

from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron import output, parallel
from rollstream.stages.megatron.batch import Sample, pack
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.policy import Policy

pytestmark = pytest.mark.megatron


KINDS = ("llama", "llama3", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def layout_of(kind: str, tp: int) -> Layout:
    return Layout(tp=tp, sp=tp > 1 and kind in ("mixtral", "qwen3_moe"))


def score(world: World, folder: Path, group: pa.RecordBatch, layout: Layout) -> list[Any]:
    stage = RefLogprob(RefLogprob.Config(model=str(folder), layout=layout, temperature=0.7, micro_batch_size=2))
    stage.setup(world)
    return stage.process(group)["ref_logprobs"].to_pylist()


def logits(world: World, folder: Path, sequences: list[list[int]], layout: Layout) -> np.ndarray:
    """[T, V] of packed sequences."""
    with on_platform():
        parallel.init(world, layout, seed=0)
        policy = Policy(RefLogprob.Config(model=str(folder), layout=layout))
        samples = [
            Sample(sample_id="", prompt_ids=np.array(s[:1]), response_ids=np.array([*s[1:], 0])) for s in sequences
        ]
        part = policy.chunks[0]._run(pack(samples, multiple_of=layout.token_multiple))[0].detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(layout.tp)]
        dist.all_gather(parts, part)
    return torch.cat(parts, -1)[: sum(map(len, sequences)), : policy.config.vocab_size].numpy()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_agree_with_transformers(launch: Any, tiny: Any, hf_model: Any, kind: str, tied: bool, tp: int) -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 131, size).tolist() for size in (9, 1, 30, 17)]
    ours = launch(tp, logits, tiny(kind, tied), sequences, layout_of(kind, tp))[0]
    model = hf_model(tiny(kind, tied))
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences])
    np.testing.assert_allclose(ours, wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(pp=2)], ids=["one", "tp2 sp", "pp2"])
def test_logprobs_agree_with_transformers(
    launch: Any, tiny: Any, hf_model: Any, hf_logprobs: Any, make_groups: Any, kind: str, layout: Layout
) -> None:
    folder, (group,) = tiny(kind), make_groups(num_groups=1, samples=5)
    ours = launch(layout.size, score, folder, group, layout)
    model = hf_model(folder)
    for row, got in zip(group.to_pylist(), ours[0], strict=True):
        wanted = hf_logprobs(model, row["prompt_ids"], row["response_ids"], 0.7).detach().numpy()
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=["one", "tp2"])
def test_logits_in_chunks_change_nothing(
    launch: Any, tiny: Any, make_groups: Any, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    (group,) = make_groups(num_groups=1, samples=5)
    whole = launch(layout.size, score, tiny("qwen2"), group, layout)[0]
    monkeypatch.setitem(output.MAX_LOGITS, "cpu", 5 * 256 // layout.tp)
    chunked = launch(layout.size, score, tiny("qwen2"), group, layout)[0]
    for got, wanted in zip(chunked, whole, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_a_sample_longer_than_the_window_is_refused(launch: Any, tiny: Any, make_groups: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny("mistral"), tmp_path / "m")
    settings = json.loads((tmp_path / "m/config.json").read_text()) | {"sliding_window": 8}
    (tmp_path / "m/config.json").write_text(json.dumps(settings))
    with pytest.raises(AssertionError, match=r"sample 'g0-0' has \d+ tokens; .* has a sliding window of 8"):
        launch(1, score, tmp_path / "m", make_groups(num_groups=1)[0], Layout())
