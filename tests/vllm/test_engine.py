"""What vLLM draws: right log-probabilities, every end of a response, and errors that name their cause."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from small_engines import CONTEXT, EOS, PROMPTS, VOCABULARY, draw, greedy, logprobs_of, make_engine, weights

from rollstream.stages.errors import EngineDied, StageError
from rollstream.stages.rollout import vllm_engine
from rollstream.stages.rollout.engine import Request, Sampling, generate

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_equal_a_full_forward_pass_at_any_temperature(engine, folders, temperature):
    for group_id, samples in draw(engine, temperature=temperature).items():
        for sample in samples:
            expected = logprobs_of(folders["a"], PROMPTS[group_id], sample.response_ids, temperature)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_truncated_draws_keep_the_logprobs_of_all_tokens(folders):
    sampling = Sampling(max_tokens=24, top_p=0.8, top_k=5)
    engine = make_engine(folders["untied"], sampling=sampling)
    try:
        request = Request(request_id="a", prompt_ids=PROMPTS["a"], sample_ids=["a.0", "a.1"], sampling=sampling)
        for sample in dict(generate(engine, [request]))["a"]:
            expected = logprobs_of(folders["untied"], PROMPTS["a"], sample.response_ids)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
        engine.load_weights(1, weights(folders["other"]))
        fresh = dict(generate(engine, [request]))["a"][0]
        np.testing.assert_allclose(
            fresh.logprobs, logprobs_of(folders["other"], PROMPTS["a"], fresh.response_ids), atol=1e-5
        )
    finally:
        engine.close()


def test_a_sample_depends_on_its_id_and_the_seed_alone(engine):
    def tokens(**settings) -> list[list[int]]:
        return [s.response_ids.tolist() for s in draw(engine, **settings)["a"]]

    samples = tokens(names="a", n=6)
    assert len(set(map(tuple, samples))) == 6
    assert tokens(names="dcba", n=6) == samples
    assert tokens(names="a", n=6, seed=1) != samples


def test_the_likeliest_tokens_are_those_of_transformers(engine, folders):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["a"], dtype=torch.float32)
    for group_id, tokens in greedy(engine).items():
        out = model.generate(torch.tensor([PROMPTS[group_id]]), max_new_tokens=40, do_sample=False, pad_token_id=0)
        assert tokens == out[0, len(PROMPTS[group_id]) :].tolist()


def test_a_response_ends_with_its_stop_token(engine):
    free = draw(engine, "a", n=1)["a"][0]
    stop = int(free.response_ids[4])
    first = free.response_ids.tolist().index(stop)
    sample = draw(engine, "a", n=1, stop_token_ids=(stop,))["a"][0]
    assert sample.finish_reason == "stop"
    assert sample.response_ids.tolist() == free.response_ids[: first + 1].tolist()
    assert len(sample.logprobs) == len(sample.versions) == first + 1


def test_a_response_may_be_its_stop_token_alone(engine):
    free = draw(engine, "a", n=1)["a"][0]
    sample = draw(engine, "a", n=1, stop_token_ids=(int(free.response_ids[0]),))["a"][0]
    assert (sample.response_ids.tolist(), sample.finish_reason) == ([free.response_ids[0]], "stop")


def test_the_models_own_end_of_sequence_token_stops(engine):
    samples = [s for group in draw(engine, n=32, max_tokens=60).values() for s in group]
    ended = [s for s in samples if s.finish_reason == "stop"]
    running = [s for s in samples if s.finish_reason == "length"]
    assert ended
    assert running
    assert all(s.response_ids[-1] == EOS and EOS not in s.response_ids[:-1] for s in ended)
    assert all(len(s.response_ids) == 60 and EOS not in s.response_ids for s in running)


def test_a_response_that_fills_the_context_ends_for_length(engine):
    sampling = Sampling(max_tokens=5, temperature=0.0)
    lengths = {"near": CONTEXT - 2, "last": CONTEXT - 1, "far": 1}
    given = [Request(request_id=g, prompt_ids=[3] * k, sample_ids=[g], sampling=sampling) for g, k in lengths.items()]
    samples = {g: s[0] for g, s in generate(engine, given)}
    assert {g: len(s.response_ids) for g, s in samples.items()} == {"near": 2, "last": 1, "far": 5}
    assert {s.finish_reason for s in samples.values()} == {"length"}


@pytest.mark.parametrize(
    ("prompt_ids", "fault"),
    [
        ([], "at least one token"),
        ([3, VOCABULARY], f"from 0 to {VOCABULARY - 1}, got [{VOCABULARY}]"),
        ([-1], f"from 0 to {VOCABULARY - 1}, got [-1]"),
        ([3] * CONTEXT, f"shorter than the model's context of {CONTEXT}"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_names_its_group_and_hurts_no_other(engine, prompt_ids, fault):
    bad = Request(request_id="r3", prompt_ids=prompt_ids, sample_ids=["x"], sampling=Sampling(max_tokens=1))
    with pytest.raises(StageError) as error:
        engine.submit(bad)
    assert error.value.subject == "group r3"
    assert fault in error.value.cause
    assert draw(engine, "b", n=1)["b"][0].response_ids.size


def test_hundreds_of_requests_are_in_flight_and_the_short_ones_leave_first(engine):
    long, short = Sampling(max_tokens=240), Sampling(max_tokens=1)
    given = [
        Request(
            request_id=str(i), prompt_ids=[2 + i % 60], sample_ids=[str(i)], sampling=long if 200 <= i < 220 else short
        )
        for i in range(600)
    ]
    ended = [(name, len(samples[0].response_ids)) for name, samples in generate(engine, given, timeout_s=60)]
    assert sorted(int(name) for name, _ in ended) == list(range(600))
    longest = max(ended, key=lambda pair: pair[1])
    assert longest[1] > 50
    assert ended.index(longest) > 400


def test_broken_weights_stop_the_run(engine, folders):
    broken = [(n, np.full_like(w, np.nan) if n == "model.norm.weight" else w) for n, w in weights(folders["a"])]
    engine.load_weights(1, broken)
    with pytest.raises(StageError, match="weights are broken") as error:
        draw(engine, "a", n=1)
    assert error.value.subject == "a.0"


def test_wrong_weights_list_every_fault(engine, folders):
    tensors = dict(weights(folders["a"]))
    norm = tensors.pop("model.norm.weight")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1]
    tensors["model.norm.bias"] = norm
    with pytest.raises(StageError) as error:
        engine.load_weights(3, tensors.items())
    for fault in (
        "norm.bias is not a parameter",
        "norm.weight did not arrive",
        "must have shape (64, 64), got (63, 64)",
    ):
        assert fault in str(error.value)
    engine.load_weights(1, weights(folders["a"]))
    assert greedy(engine)


def test_weights_that_change_on_their_way_are_found_where_they_are_checked(folders, monkeypatch):
    engine = make_engine(folders["a"], check_weights=True)
    engine.load_weights(1, weights(folders["b"]))
    files_of = vllm_engine.files_of

    def damaged(tensors, folder):
        for path in files_of(tensors, folder):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            yield path

    monkeypatch.setattr(vllm_engine, "files_of", damaged)
    with pytest.raises(Exception, match="arrived changed: CRC-32"):
        engine.load_weights(2, weights(folders["a"]))
    with pytest.raises(EngineDied, match="took the weights of version 2 in part only"):
        draw(engine, "a", n=1)
    engine.close()


def test_a_core_that_hangs_is_found_and_ended_within_its_deadline(folders):
    """All threads of its process are stopped; nothing is closed, so that only its silence tells."""
    engine = make_engine(folders["a"], timeout_s=3.0)
    for request in (Request(request_id=str(i), prompt_ids=[5], sample_ids=[str(i)], sampling=Sampling(max_tokens=200))
                    for i in range(40)):  # fmt: skip
        engine.submit(request)
    for pid in engine.pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="gave no answer for 3 s"):
        take_until(engine, time.monotonic() + 30)
    assert not any(alive(pid) for pid in engine.pids)


def take_until(engine, give_up: float) -> None:
    while time.monotonic() < give_up:
        engine.finished(1.0)


def alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
