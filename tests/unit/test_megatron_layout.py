"""What the driver can say about a model and a layout, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    assert "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in fault


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4}
    faults = Layout(tp=0).faults(folder(tmp_path, rope_parameters=rope, hidden_act="gelu", mlp_bias=True))
    text = "\n".join(faults)
    assert "tp must be at least 1, got 0" in text
    assert "rope type 'yarn' is not supported; supported: default, linear, llama3" in text
    assert "hidden_act must be 'silu', got 'gelu'" in text
    assert "mlp_bias=True is not supported" in text


def test_older_name_of_the_rope_settings_is_read(tmp_path: Path) -> None:
    config = hf_config.read(folder(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e5))
    assert (config.rope_type, config.rope_theta) == ("linear", 5e5)


def test_head_size_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert hf_config.read(folder(tmp_path)).head_size == 8
    assert hf_config.read(folder(tmp_path, head_dim=32)).head_size == 32


def test_rank_belongs_to_the_copy_of_its_tensor_parallel_group() -> None:
    assert [Layout(tp=2, dp=2).share_of(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_stages_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, rollstream.stages.actor, rollstream.stages.logprob\n"
        "sys.exit(' '.join({'torch', 'transformers', 'megatron'} & set(sys.modules)) or None)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
