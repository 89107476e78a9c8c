"""Tiny models, batches, and ranks forked from the test's process, each with a deadline."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for small_updates

from rollstream.stages.base import World
from rollstream.stages.megatron import cpu_platform

cpu_platform.prepare()  # once, here: a forked rank starts at once

import torch  # noqa: E402

torch.set_num_threads(1)  # a fork of a process with OpenMP threads may hang

DEADLINE_S = 90.0
VOCAB = 131  # prime: no tensor-parallel size divides it


@pytest.fixture(scope="session")
def launch() -> Callable[..., list[Any]]:
    """launch(size, function, *args): the results of function(world, *args) on `size` ranks, by rank."""
    return _launch


def _launch(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worlds = [World(rank=rank, size=size, port=port, threads=1) for rank in range(size)]
    ranks = [context.Process(target=_rank, args=(answers, function, world, args), daemon=True) for world in worlds]
    for rank in ranks:
        rank.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    try:
        while len(results) < size:
            try:
                index, result, error = answers.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"only ranks {sorted(results)} of {size} answered in {DEADLINE_S} s") from None
            if error:
                raise AssertionError(f"rank {index} failed:\n{error}")
            results[index] = result
    finally:
        for rank in ranks:
            rank.join(0.0 if len(results) < size else 10.0)
            if rank.is_alive():
                rank.kill()
    return [results[index] for index in range(size)]


def _rank(answers: Any, function: Callable[..., Any], world: World, args: tuple[Any, ...]) -> None:
    try:
        answers.put((world.rank, function(world, *args), None))
    except BaseException:  # noqa: BLE001 - the error goes to the test
        answers.put((world.rank, None, traceback.format_exc()))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(kind, tied=False, num_layers=2): folder of a random model with 4 heads and 2 key/value heads."""
    folders: dict[tuple[str, bool, int], Path] = {}

    def make(kind: str, tied: bool = False, num_layers: int = 2) -> Path:
        key = (kind, tied, num_layers)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"{kind}{'_tied' if tied else ''}{num_layers}")
            _tiny_model(*key).save_pretrained(folders[key])
        return folders[key]

    return make


#: Kinds of `tiny`, and how transformers names their config.
CONFIGS = {
    "llama": "LlamaConfig",
    "llama3": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}


def _tiny_model(kind: str, tied: bool, num_layers: int) -> Any:
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    if kind == "llama3":
        rope |= {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 64
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": rope,
    }
    if kind.startswith("qwen3"):
        settings["head_dim"] = 32
    if kind == "mixtral":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = getattr(transformers, CONFIGS[kind])
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config(**settings)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases away from 1 and 0, or a mistake in them would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    return model


@pytest.fixture(scope="session")
def hf_model() -> Callable[[Path], Any]:
    """hf_model(folder): transformers' own model, eager attention, float32."""

    def make(folder: Path) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    return make


@pytest.fixture(scope="session")
def hf_logprobs() -> Callable[..., torch.Tensor]:
    """hf_logprobs(model, prompt_ids, response_ids, temperature): of each response token, with gradients."""

    def score(model: Any, prompt_ids: Any, response_ids: Any, temperature: float = 1.0) -> torch.Tensor:
        ids = torch.tensor([*prompt_ids, *response_ids], dtype=torch.long)
        logits = model(ids[None]).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
        labels = torch.tensor(list(response_ids), dtype=torch.long)
        return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    return score


@pytest.fixture(scope="session")
def make_groups() -> Callable[..., list[pa.RecordBatch]]:
    """make_groups(num_groups, samples): groups of random samples, with all columns that an update reads."""
    return _make_groups


def _make_groups(num_groups: int = 4, samples: int = 3, seed: int = 3, vocab: int = VOCAB) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(seed)
    groups: list[pa.RecordBatch] = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab, rng.integers(1, 12)).tolist()
        lengths = rng.integers(1, 25, samples)
        if group == 0:
            lengths[-1] = 0  # an empty response is a sample too
        masks = [rng.random(n) < 0.8 for n in lengths]
        groups.append(
            _batch(
                sample_id=[f"g{group}-{i}" for i in range(samples)],
                prompt_ids=[prompt] * samples,
                response_ids=[rng.integers(0, vocab, n).tolist() for n in lengths],
                loss_mask=[mask.tolist() for mask in masks],
                rollout_logprobs=[(-5 + rng.normal(size=n)).tolist() for n in lengths],
                advantages=[np.where(mask, rng.normal(), 0.0).tolist() for mask in masks],
                ref_logprobs=[(-5 + rng.normal(size=n)).tolist() for n in lengths],
            )
        )
    return groups


def _batch(**columns: list[Any]) -> pa.RecordBatch:
    types: dict[str, pa.DataType] = {"sample_id": pa.string(), "loss_mask": pa.list_(pa.bool_())}
    types |= dict.fromkeys(("prompt_ids", "response_ids"), pa.list_(pa.int32()))
    arrays = [pa.array(values, types.get(name, pa.list_(pa.float32()))) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
