"""Tests that need a CUDA device; skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models "a" and "b" of one kind, in bfloat16."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name, seed) for seed, name in enumerate("ab", 1)}


def save_model(folder: Path, seed: int) -> str:
    """A random Qwen2, sharp enough to have likely tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)
