"""Cutting Hugging Face tensors into ranks' parts, and joining them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.stages.megatron.hf_config import HFConfig


@pytest.fixture
def config() -> HFConfig:
    return HFConfig(
        folder=Path("m"),
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=8,
        ffn_size=12,
        num_heads=8,
        num_kv_heads=4,
        head_size=2,
        vocab_size=13,
        norm_eps=1e-6,
        rope_type="default",
        rope_theta=1e4,
        max_positions=64,
        tied=False,
        qkv_bias=True,
        qk_norm=True,
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["columns", "copy", "gate_up", "qkv", "vocab"])
def test_split_undoes_join(config: HFConfig, kind: str, tp: int) -> None:
    import torch

    from rollstream.stages.megatron import rules

    sizes = {"qkv": [16, 8, 8], "gate_up": [12, 12], "vocab": [13]}.get(kind, [12])
    tensors = [torch.randn(size, 8) for size in sizes]
    axis = 1 if kind == "columns" else 0
    parts = []
    for rank in range(tp):
        pieces = []
        for tensor in tensors:
            start, end = rules.local_range(kind, tensor.shape[axis], tp, rank, padded=16)
            pieces.append(tensor.narrow(axis, start, end - start))
        parts.append(rules.join(kind, pieces, config, num_rows=16 // tp))
    again = rules.split(kind, parts, config)
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))


def test_qkv_is_interleaved_by_key_value_head(config: HFConfig) -> None:
    import torch

    from rollstream.stages.megatron import rules

    query, key, value = torch.arange(16), 100 + torch.arange(8), 200 + torch.arange(8)
    joined = rules.join("qkv", [query, key, value], config, num_rows=32)
    assert joined[:8].tolist() == [0, 1, 2, 3, 100, 101, 200, 201]


def test_every_parameter_has_a_shape(config: HFConfig) -> None:
    from rollstream.stages.megatron import rules

    names = [f"decoder.layers.0.{module}.weight" for module in rules.LAYER_RULES]
    names += [*rules.MODEL_RULES, "decoder.layers.0.self_attention.linear_qkv.bias"]
    needed = {hf_name for name in names for hf_name in rules.rule_of(name).names}
    assert needed == set(rules.hf_shapes(config))
