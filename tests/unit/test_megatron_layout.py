"""What the driver can say about a model and a layout, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.stages.errors import ConfigError
from rollstream.stages.megatron import hf_config
from rollstream.stages.megatron.layout import Layout

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 131,
}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def folder(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_valid_layouts_have_no_faults(tmp_path: Path, tp: int) -> None:
    assert Layout(tp=tp, dp=3).faults(folder(tmp_path)) == []


def test_tp_must_divide_heads_and_says_which_do(tmp_path: Path) -> None:
    (fault,) = Layout(tp=8).faults(folder(tmp_path, num_attention_heads=16))
    assert "tp=8 must divide 4 key/value heads" in fault
    assert fault.endswith("valid: tp=1, 2, 4")


def test_every_size_that_tp_does_not_divide_is_named(tmp_path: Path) -> None:
    (fault,) = Layout(tp=3).faults(folder(tmp_path, intermediate_size=100))
    assert "8 attention heads and 4 key/value heads and 100 feed-forward size" in fault


def test_missing_folder_is_named(tmp_path: Path) -> None:
    (fault,) = Layout().faults(tmp_path / "nowhere")
    assert "nowhere' is not a folder" in fault


def test_missing_config_is_named(tmp_path: Path) -> None:
    (fault,) = Layout().faults(tmp_path)
    assert "has no config.json" in fault


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    (fault,) = Layout().faults(folder(tmp_path, architectures=["GPT2LMHeadModel"]))
    assert "GPT2LMHeadModel" in fault
    assert "known: LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM" in fault
    assert "ARCHITECTURES of hf_config.py and in rules.py" in fault


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4}
    (text,) = Layout().faults(folder(tmp_path, rope_parameters=rope, hidden_act="gelu", mlp_bias=True))
    assert "rope type 'yarn' is not supported; supported: default, linear, llama3" in text
    assert "hidden_act must be 'silu', got 'gelu'" in text
    assert "mlp_bias=True is not supported" in text


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"sp": True}, "sp=True needs tp above 1, got tp=1"),
        ({"vpp": 2}, "vpp=2 needs pp above 1, got pp=1"),
        ({"first_layers": 1}, "first_layers and last_layers need pp above 1, got pp=1"),
        ({"dp": 3, "ep": 2}, "ep=2 times etp=1 must divide tp=1 times dp=3"),
        ({"tp": 2, "sp": True, "dp": 2, "ep": 4}, "ep=4 times etp=2 must divide tp=2 times dp=2"),
    ],
)
def test_sizes_that_contradict_one_another_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=3), "pp=3 with vpp=1 must divide 8 of 8 layers"),
        (Layout(pp=3), "valid: pp=1, 2, 4, 8 with vpp=1, or give first_layers or last_layers"),
        (Layout(pp=2, vpp=3), "pp=2 with vpp=3 must divide 8 of 8 layers"),
        (Layout(pp=3, first_layers=3), "first_layers=3 and last_layers=None must divide 5 of 8 layers"),
        (Layout(pp=2, first_layers=3, last_layers=3), "first_layers=3 and last_layers=3 leave 2 of 8 layers"),
        (Layout(pp=9), "pp=9, vpp=1 leave 8 of 8 layers"),
        (Layout(pp=3, vpp=3), "for 3 ranks with 3 runs of layers each: every run needs a layer"),
        (Layout(pp=2, vpp=2, first_layers=3), "must divide 5 of 8 layers"),
        (Layout(dp=2, ep=2), "ep=2 and etp=None are for models with experts"),
    ],
)
def test_layers_must_come_out_even(tmp_path: Path, layout: Layout, message: str) -> None:
    (fault,) = layout.faults(folder(tmp_path, num_hidden_layers=8))
    assert message in fault


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=2), Layout(pp=3, first_layers=4), Layout(pp=2, first_layers=5)])
def test_uneven_runs_of_layers_are_allowed(tmp_path: Path, layout: Layout) -> None:
    assert layout.faults(folder(tmp_path, num_hidden_layers=8)) == []


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=3, ep=3), "ep=3 must divide 4 experts"),
        (Layout(dp=5, etp=5), "etp=5 must divide 48, the feed-forward size of an expert"),
        (Layout(tp=2), "tp=2 with experts needs sp=True"),
    ],
)
def test_experts_must_come_out_even(tmp_path: Path, layout: Layout, message: str) -> None:
    (fault,) = layout.faults(folder(tmp_path, **MOE))
    assert message in fault


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "lacks num_experts (or num_local_experts)"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1, got 2"),
    ],
)
def test_models_with_dense_layers_between_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (fault,) = Layout().faults(folder(tmp_path, **{**MOE, **changes}))
    assert message in fault


def test_a_window_counts_only_where_it_is_used(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 100}
    assert hf_config.read(folder(tmp_path, **mistral, sliding_window=50)).window == 50
    assert hf_config.read(folder(tmp_path, **mistral, sliding_window=100)).window is None
    assert hf_config.read(folder(tmp_path, sliding_window=50, use_sliding_window=False)).window is None


def test_older_name_of_the_rope_settings_is_read(tmp_path: Path) -> None:
    config = hf_config.read(folder(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5))
    assert (config.rope_type, config.rope_theta) == ("linear", 5e5)


def test_head_size_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert hf_config.read(folder(tmp_path)).head_size == 8
    assert hf_config.read(folder(tmp_path, head_dim=32)).head_size == 32


def test_rank_belongs_to_the_copy_of_its_tensor_parallel_group() -> None:
    assert [Layout(tp=2, dp=2).share_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [Layout(tp=2, pp=2, dp=2).share_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2


def test_stages_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, rollstream.stages.actor, rollstream.stages.logprob\n"
        "sys.exit(' '.join({'torch', 'transformers', 'megatron'} & set(sys.modules)) or None)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
