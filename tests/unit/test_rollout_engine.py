from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.engine import Request, Sample, Sampling
from rollstream.stages.rollout.engine import generate as run_engine
from rollstream.stages.rollout.hf_engine import TransformersEngine
from rollstream.stages.rollout.sampler import Sampler

VOCABULARY, CONTEXT, EOS = 48, 64, 1
PROMPTS = {"a": [5, 6, 7, 8, 9, 10], "b": [20], "c": [11, 3, 40]}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only lose time to threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_model(folder: Path, *, seed: int = 0, tied: bool = False) -> str:
    """A random Llama with 2 layers, sharp enough to have likely tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: str) -> TransformersEngine:
    return TransformersEngine(folder, dtype="float32", stage="rollout")


def generate(engine: TransformersEngine, groups: str = "abc", n: int = 3, **settings) -> dict[str, list[Sample]]:
    """Samples by group."""
    sampling = Sampling(**{"max_tokens": 12} | settings)
    requests = [request(g, PROMPTS[g], [f"{g}.{i}" for i in range(n)], sampling) for g in groups]
    return dict(run_engine(engine, requests))


def request(name: str, prompt_ids: list[int], sample_ids: list[str], sampling: Sampling) -> Request:
    return Request(request_id=name, prompt_ids=prompt_ids, sample_ids=sample_ids, sampling=sampling)


def tokens(samples: dict[str, list[Sample]]) -> dict[str, list[list[int]]]:
    return {g: [s.response_ids.tolist() for s in group] for g, group in samples.items()}


def logprobs_of(folder: str, prompt: list[int], response: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of a response by one forward pass over prompt and response."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"top_k": 5}, {"temperature": 1.3, "top_k": 10, "top_p": 0.8}]
)
def test_logprobs_equal_a_full_forward_pass(engine, folder, settings):
    for group_id, samples in generate(engine, **settings).items():
        for sample in samples:
            expected = logprobs_of(folder, PROMPTS[group_id], sample.response_ids, settings.get("temperature", 1.0))
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_samples_do_not_depend_on_the_batch(engine):
    together = tokens(generate(engine, "abc"))
    assert tokens(generate(engine, "cba")) == together
    assert {g: tokens(generate(engine, g))[g] for g in "abc"} == together
    assert {g: s[:2] for g, s in together.items()} == tokens(generate(engine, "abc", n=2))


def test_samples_of_a_group_differ_and_the_seed_matters(engine):
    samples = tokens(generate(engine, "a", n=6))["a"]
    assert len(set(map(tuple, samples))) == 6
    assert tokens(generate(engine, "a", n=6, seed=1))["a"] != samples


def test_a_shared_prefill_gives_what_a_full_pass_gives(engine, monkeypatch):
    shared = generate(engine)
    monkeypatch.setattr(engine, "_prefilled", lambda *args: {})
    plain = generate(engine)
    assert tokens(shared) == tokens(plain)
    for group_id in PROMPTS:
        for one, other in zip(shared[group_id], plain[group_id], strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_the_likeliest_tokens_equal_transformers_own_greedy_search(engine, folder):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(torch.tensor([PROMPTS["a"]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    sample = generate(engine, n=1, temperature=0.0)["a"][0]
    assert sample.response_ids.tolist() == out[0, len(PROMPTS["a"]) :].tolist()


def test_a_response_ends_with_its_stop_token(engine):
    free = generate(engine, "a", n=1)["a"][0]
    stop = int(free.response_ids[4])
    first = free.response_ids.tolist().index(stop)
    sample = generate(engine, "a", n=1, stop_token_ids=(stop,))["a"][0]
    assert sample.finish_reason == "stop"
    assert sample.response_ids.tolist() == free.response_ids[: first + 1].tolist()
    assert len(sample.logprobs) == len(sample.versions) == first + 1


def test_the_models_own_end_of_sequence_token_stops(engine):
    samples = generate(engine, n=64, max_tokens=40)
    ended = [s for group in samples.values() for s in group if s.finish_reason == "stop"]
    assert ended
    assert all(s.response_ids[-1] == EOS and EOS not in s.response_ids[:-1] for s in ended)
    running = [s for group in samples.values() for s in group if s.finish_reason == "length"]
    assert running
    assert all(len(s.response_ids) == 40 and EOS not in s.response_ids for s in running)


def test_a_response_that_fills_the_context_ends_for_length(engine):
    sampling = Sampling(max_tokens=5, temperature=0.0)
    near = request("near", [3] * (CONTEXT - 2), ["near.0"], sampling)
    far = request("far", [3], ["far.0"], sampling)
    samples = dict(run_engine(engine, [near, far]))
    assert (len(samples["near"][0].response_ids), samples["near"][0].finish_reason) == (2, "length")
    assert len(samples["far"][0].response_ids) == 5


@pytest.mark.parametrize(
    ("prompt_ids", "fault"),
    [
        ([], "at least one token"),
        ([3, VOCABULARY], "from 0 to 47, got [48]"),
        ([-1], "from 0 to 47, got [-1]"),
        ([3] * CONTEXT, "shorter than the model's context of 64"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_names_its_group(engine, prompt_ids, fault):
    bad = request("r000003.e0", prompt_ids, ["x"], Sampling(max_tokens=1))
    with pytest.raises(StageError) as error:
        engine.submit(bad)
    assert error.value.subject == "group r000003.e0"
    assert fault in error.value.cause


def weights(folder: str) -> list[tuple[str, np.ndarray]]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [(name, p.detach().numpy()) for name, p in model.named_parameters()]


@pytest.mark.parametrize("tied", [False, True])
def test_loaded_weights_give_what_a_fresh_model_gives(tmp_path, tied):
    old, new = (save_model(tmp_path / str(seed), seed=seed, tied=tied) for seed in (1, 2))
    engine = TransformersEngine(old, dtype="float32", stage="rollout")
    before = tokens(generate(engine))
    engine.load_weights(5, weights(new))
    after = generate(engine)
    assert tokens(after) != before
    assert tokens(after) == tokens(generate(TransformersEngine(new, dtype="float32", stage="rollout")))
    assert {v for g in after.values() for s in g for v in s.versions.tolist()} == {5}


def test_a_model_that_rests_leaves_its_device_until_new_weights_come(folder, monkeypatch):
    engine = TransformersEngine(folder, dtype="float32", stage="rollout")
    before, places, move = tokens(generate(engine)), [], engine._model.to
    engine._device = torch.device("cpu:0")
    monkeypatch.setattr(engine._model, "to", lambda device: places.append(str(device)) or move(device))
    engine.rest()
    engine.load_weights(1, weights(folder))
    assert places == ["cpu", "cpu:0"]
    assert tokens(generate(engine)) == before


def test_tied_weights_may_arrive_under_both_names(tmp_path):
    folder = save_model(tmp_path, tied=True)
    engine = TransformersEngine(folder, dtype="float32", stage="rollout")
    tensors = dict(weights(folder))
    engine.load_weights(1, [*tensors.items(), ("lm_head.weight", tensors["model.embed_tokens.weight"])])
    with pytest.raises(StageError, match=r"lm_head\.weight differs"):
        engine.load_weights(2, [*tensors.items(), ("lm_head.weight", 0 * tensors["model.embed_tokens.weight"])])


def test_wrong_weights_list_every_fault(engine, folder):
    tensors = dict(weights(folder))
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.norm.bias"] = np.zeros(32, np.float32)
    with pytest.raises(StageError) as error:
        engine.load_weights(3, tensors.items())
    for fault in (
        "model.norm.bias is not a parameter",
        "model.norm.weight did not arrive",
        "lm_head.weight must have shape (48, 32), got (47, 32)",
    ):
        assert fault in str(error.value)


def test_read_only_arrays_are_taken_and_left_alone(engine, folder):
    tensors = weights(folder)
    for _, array in tensors:
        array.flags.writeable = False
    engine.load_weights(1, tensors)
    assert generate(engine)["a"][0].versions[0] == 1


def test_broken_weights_stop_the_run(engine, folder):
    tensors = dict(weights(folder))
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    engine.load_weights(1, tensors.items())
    with pytest.raises(StageError, match="hold NaN or infinity") as error:
        generate(engine)
    assert error.value.subject == "a.0"


def test_responses_of_different_lengths_are_one_batch_and_as_if_alone(engine, monkeypatch):
    lengths = {"a": 3, "b": 12, "c": 7}
    alone = {g: tokens(generate(engine, g, max_tokens=m))[g] for g, m in lengths.items()}
    sizes = []
    whole = engine._generate_batch
    monkeypatch.setattr(engine, "_generate_batch", lambda *a: sizes.append(len(a[0])) or whole(*a))
    requests = [
        request(g, PROMPTS[g], [f"{g}.{i}" for i in range(3)], Sampling(max_tokens=m)) for g, m in lengths.items()
    ]
    samples = dict(run_engine(engine, requests))
    assert sizes == [3]
    assert tokens(samples) == alone
    assert all(
        s.finish_reason == "length" for s in samples["a"] if len(s.response_ids) == 3 and s.response_ids[2] != EOS
    )


def test_a_batch_ends_with_the_last_row_that_may_go_on(engine, monkeypatch):
    steps = []
    sample = Sampler.__call__
    monkeypatch.setattr(Sampler, "__call__", lambda *a: steps.append(1) or sample(*a))
    free = tokens(generate(engine, "a", n=1))["a"][0]
    short = request("b", PROMPTS["b"], ["b.0"], Sampling(max_tokens=2, stop_token_ids=(free[3],)))
    long = request("a", PROMPTS["a"], ["a.0"], Sampling(max_tokens=40, stop_token_ids=(free[3],)))
    steps.clear()
    samples = dict(run_engine(engine, [short, long]))
    assert len(steps) == len(samples["a"][0].response_ids) == free.index(free[3]) + 1
