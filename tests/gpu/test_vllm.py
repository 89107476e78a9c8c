"""vLLM on a GPU: log-probabilities, new weights between and during requests, and memory that is given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.stages.megatron.weight_buffer import WeightBuffer
from rollstream.stages.rollout.engine import Request, Sample, Sampling, generate

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPTS = {"a": [5, 6, 7, 8, 9, 10], "b": [20], "c": [11, 3, 40], "d": [2] * 40}
#: Of logits in bfloat16: mean absolute difference of log-probabilities to float32, at temperature 1.
NEAR = 0.025


def make_engine(folder: str, **args: Any) -> Any:
    from rollstream.stages.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        folder,
        dtype="bfloat16",
        stage="rollout",
        sampling=Sampling(max_tokens=8),
        updates="resume",
        timeout_s=60.0,
        check_weights=True,
        args={"gpu_memory_utilization": 0.2, "enforce_eager": True, **args},
    )


@pytest.fixture(scope="module")
def engine(folders: dict[str, str]) -> Iterator[Any]:
    made = make_engine(folders["a"], enable_sleep_mode=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def fresh(folders: dict[str, str]) -> dict[str, list[int]]:
    """What an engine says that was loaded with the weights of "b"."""
    made = make_engine(folders["b"])
    said = greedy(made)
    made.close()
    return said


def weights(folder: str) -> list[tuple[str, np.ndarray]]:
    """As the trainer sends them: float32 arrays."""
    from safetensors.torch import load_file

    return [(n, t.float().numpy()) for n, t in load_file(Path(folder) / "model.safetensors").items()]


def requests(n: int, tag: str, **settings: Any) -> list[Request]:
    sampling = Sampling(**settings)
    return [
        Request(request_id=g, prompt_ids=ids, sample_ids=[f"{tag}{g}.{i}" for i in range(n)], sampling=sampling)
        for g, ids in PROMPTS.items()
    ]


def greedy(engine: Any) -> dict[str, list[int]]:
    given = requests(1, "", temperature=0.0, max_tokens=40)
    return {g: s[0].response_ids.tolist() for g, s in generate(engine, given, timeout_s=120)}


def gaps(folder: str, prompt: list[int], sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """Of each token's log-probability, to that of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    ids = torch.tensor([[*prompt, *sample.response_ids.tolist()]]).cuda()
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
    return np.abs(sample.logprobs - expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_near_a_full_pass_in_float32(engine: Any, folders: dict[str, str], temperature: float):
    given = requests(4, f"t{temperature}", max_tokens=64, temperature=temperature)
    drawn = dict(generate(engine, given, timeout_s=120))
    found = [gaps(folders["a"], PROMPTS[g], s, temperature) for g, group in drawn.items() for s in group]
    print("mean", np.concatenate(found).mean(), "max", np.concatenate(found).max())  # noqa: T201
    assert np.concatenate(found).mean() <= NEAR / temperature


@pytest.mark.parametrize("updates", ["between", "resume", "recompute", "keep"])
def test_an_updated_engine_says_what_a_fresh_one_says(engine: Any, folders: dict[str, str], fresh: Any, updates: str):
    engine.updates = updates
    before = greedy(engine)
    assert before != fresh
    engine.load_weights(7, weights(folders["b"]))
    assert greedy(engine) == fresh
    engine.load_weights(8, weights(folders["a"]))
    assert greedy(engine) == before


def test_weights_are_read_from_the_trainers_memory(engine: Any, folders: dict[str, str], fresh: Any):
    engine.updates = "resume"
    engine.load_weights(0, weights(folders["a"]))
    before = greedy(engine)
    held = {"folder": ""}
    buffer = WeightBuffer(lambda: on_gpu(held["folder"]), torch.device("cuda"))

    def put(folder: str, version: int) -> Any:
        held["folder"] = folder
        return buffer.put(version)

    first = put(folders["b"], 1)
    assert first.handle is not None
    assert engine.load_shared_weights(first)
    assert greedy(engine) == fresh
    second = put(folders["a"], 2)
    assert not engine.load_shared_weights(first)
    assert engine.load_shared_weights(second)
    assert greedy(engine) == before
    buffer.close()


def on_gpu(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in weights(folder):
        yield name, torch.from_numpy(array).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("updates", ["resume", "recompute"])
def test_each_token_has_the_logprob_of_the_version_that_it_says(engine: Any, folders: dict[str, str], updates: str):
    """New weights come when a short sample, begun with the long ones, has ended."""
    engine.updates = updates
    engine.load_weights(0, weights(folders["a"]))
    given = requests(8, updates, max_tokens=800)
    few_tokens = dataclasses.replace(given[0].sampling, max_tokens=4)
    short = dataclasses.replace(given[0], request_id="short", sample_ids=["short"], sampling=few_tokens)
    for request in [*given, short]:
        engine.submit(request)
    assert engine.finished(60.0)[0] == "short"
    engine.load_weights(1, weights(folders["b"]))
    samples = dict(engine.finished(120.0) for _ in given)
    cut = [(g, s) for g, group in samples.items() for s in group if len(set(s.versions.tolist())) == 2]
    assert cut
    for group_id, sample in cut[:4]:
        for version, name in enumerate("ab"):
            own = sample.versions == version
            assert gaps(folders[name], PROMPTS[group_id], sample)[own].mean() <= NEAR, (group_id, version)


def test_an_engine_that_rests_gives_its_memory_back_and_wakes_with_new_weights(
    engine: Any, folders: dict[str, str], fresh: Any
):
    engine.load_weights(0, weights(folders["a"]))
    before = greedy(engine)
    free_at_work, total = torch.cuda.mem_get_info()
    engine.rest()
    free_at_rest, _ = torch.cuda.mem_get_info()
    print("freed GB", (free_at_rest - free_at_work) / 1e9, "of", 0.2 * total / 1e9)  # noqa: T201
    assert free_at_rest - free_at_work > 0.9 * 0.2 * total
    engine.load_weights(1, weights(folders["b"]))
    assert greedy(engine) == fresh
    engine.load_weights(2, weights(folders["a"]))
    assert greedy(engine) == before
