"""Cutting Hugging Face tensors into ranks' parts, and joining them again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rollstream.stages.megatron.hf_config import Experts, HFConfig


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
        init_std=0.02,
        window=None,
        experts=None,
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
    needed = {hf_name for name in names for hf_name in rules.rule_of(name, config).names}
    assert needed == set(rules.hf_shapes(config))


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_every_part_of_the_experts_has_a_shape(config: HFConfig, architecture: str) -> None:
    from rollstream.stages.megatron import rules

    experts = Experts(num=3, top_k=2, ffn_size=6, normalised=True)
    config = dataclasses.replace(config, architecture=architecture, experts=experts)
    parts = ["mlp.router", *(f"mlp.experts.local_experts.{e}.linear_fc{n}" for e in range(3) for n in (1, 2))]
    names = [f"decoder.layers.0.{part}.weight" for part in parts]
    shapes = rules.hf_shapes(config)
    needed = {hf_name for name in names for hf_name in rules.rule_of(name, config).names}
    assert needed == {name for name in shapes if ".gate" in name or "experts" in name}
    assert [shapes[name] for name in rules.rule_of(names[1], config).names] == [(6, 8), (6, 8)]


def test_a_tied_copy_is_the_embedding(config: HFConfig) -> None:
    from rollstream.stages.megatron import rules

    tied = dataclasses.replace(config, tied=True)
    assert rules.rule_of("output_layer.weight", tied).names == ("model.embed_tokens.weight",)
    assert rules.rule_of("output_layer.weight", config).names == ("lm_head.weight",)
