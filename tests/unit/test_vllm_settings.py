"""What is wrong with vLLM's settings is told on the driver, which does not load vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rollstream.stages.rollout import vllm_settings
from rollstream.stages.rollout.engine import Sampling

PLAIN = Sampling(max_tokens=8)


@pytest.fixture
def model(tmp_path):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return str(tmp_path)


def test_an_unknown_setting_is_told_with_the_nearest(model):
    (fault,) = vllm_settings.faults(model, {"max_num_seq": 8, "gpu_memory_utilization": 0.5}, PLAIN)
    assert fault == "engine_args: vLLM has no setting 'max_num_seq': did you mean 'max_num_seqs'?"


def test_what_the_stage_sets_itself_is_not_taken(model):
    (fault,) = vllm_settings.faults(model, {"logprobs_mode": "raw_logits"}, PLAIN)
    assert fault == "engine_args: logprobs_mode is set by temperature, top_p and top_k: leave it out"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_truncated_draws_have_right_logprobs_at_these_temperatures(model, temperature):
    assert vllm_settings.faults(model, {}, Sampling(max_tokens=8, temperature=temperature, top_k=5)) == []


def test_truncated_draws_at_another_temperature_are_refused(model):
    (fault,) = vllm_settings.faults(model, {}, Sampling(max_tokens=8, temperature=0.7, top_p=0.9))
    assert "temperature=0.7" in fault
    assert "engine='transformers'" in fault


def test_heads_that_the_cpu_kernels_do_not_know_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "hidden_size": 64}))
    (fault,) = vllm_settings.faults(str(tmp_path), {}, PLAIN)
    assert "this model's have 16" in fault


def test_the_cache_holds_two_sequences_of_full_length(model):
    bytes_per_token = 2 * 4 * 2 * 2 * 64  # keys and values, float32, layers, heads, values of a head
    long = vllm_settings.engine_args(model, "float32", PLAIN, {"max_model_len": 10**6}, on_gpu=False)
    assert long["kv_cache_memory_bytes"] >= 2 * bytes_per_token * 10**6
    assert long["max_num_batched_tokens"] == 10**6
    short = vllm_settings.engine_args(model, "float32", PLAIN, {}, on_gpu=False)
    assert short["kv_cache_memory_bytes"] == vllm_settings.CPU_KV_BYTES


def test_what_the_user_gives_stands(model):
    given = {"kv_cache_memory_bytes": 5, "enforce_eager": False}
    args = vllm_settings.engine_args(model, "float32", PLAIN, given, on_gpu=False)
    assert given.items() <= args.items()


def test_checking_settings_does_not_load_vllm():
    code = (
        "import sys; from rollstream.stages.rollout import vllm_settings as s;"
        "assert 'max_num_seqs' in s.known_args(); print('vllm' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"
