"""vLLM's log-probabilities are the trainer's: at any temperature, after new weights, and token by token in flight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron.layout import Layout

pytestmark = [pytest.mark.megatron, pytest.mark.vllm]


PROMPTS = [[5, 6, 7, 8, 9, 10], [20], [11, 3, 40] * 5]
#: "What is 7 + 9?" and the like, in SmolLM2's chat format.
CHAT = [[1, 4093, 198, 1780, 314, 216, 39, 1232, 216, 41, 47, 2, 198, 1, 520, 9531, 198]]
CHAT += [[*CHAT[0][:6], digit, *CHAT[0][7:]] for digit in (36, 37)]


def draw(model: Path, new_weights: Path, max_tokens: int, prompts: list[list[int]], out: Path) -> list[dict[str, Any]]:
    script = Path(__file__).parent / "draw_with_vllm.py"
    command = [sys.executable, script, model, new_weights, max_tokens, json.dumps(prompts), out]
    subprocess.run([str(part) for part in command], check=True, timeout=240)
    return json.loads(out.read_text())


def score(world: World, folder: Path, rows: list[dict[str, Any]], temperature: float) -> list[list[float]]:
    """Megatron's log-probabilities of the rows of this temperature."""
    stage = RefLogprob(RefLogprob.Config(model=str(folder), layout=Layout(tp=world.size), temperature=temperature))
    stage.setup(world)
    chosen = [row for row in rows if row["temperature"] == temperature]
    group = pa.RecordBatch.from_pylist(
        [
            {"prompt_ids": r["prompt_ids"], "response_ids": r["response_ids"], "sample_id": str(i)}
            for i, r in enumerate(chosen)
        ],
        schema=pa.schema(
            {"prompt_ids": pa.list_(pa.int32()), "response_ids": pa.list_(pa.int32()), "sample_id": pa.string()}
        ),
    )
    return stage.process(group)["ref_logprobs"].to_pylist()


def check(launch: Any, rows: list[dict[str, Any]], models: list[Path], tp: int) -> None:
    """Each token's log-probability is that of the model whose version it carries."""
    for temperature in (1.0, 0.7):
        wanted = [launch(tp, score, model, rows, temperature)[0] for model in models]
        for index, row in enumerate(row for row in rows if row["temperature"] == temperature):
            by_version = [np.array(scores[index]) for scores in wanted]
            own = np.choose(row["versions"], by_version) if len(models) == 2 else by_version[0]
            np.testing.assert_allclose(row["logprobs"], own, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_on_tiny_models(launch: Any, tmp_path: Path, tied: bool) -> None:
    models = [save(tmp_path / str(seed), seed, tied) for seed in (1, 2)]
    rows = draw(*models, 200, PROMPTS, tmp_path / "rows.json")
    assert any(len(set(row["versions"])) == 2 for row in rows), "no sample was under way when the weights came"
    check(launch, rows, models, tp=2)


def test_on_smollm2(launch: Any, smollm2: Path, tmp_path: Path) -> None:
    """Its weights come a second time as new ones."""
    rows = draw(smollm2, smollm2, 12, CHAT, tmp_path / "rows.json")
    assert {version for row in rows for version in row["versions"]} == {0, 1}
    check(launch, rows, [smollm2], tp=1)


def save(folder: Path, seed: int, tied: bool) -> Path:
    """A random Qwen2 with heads of 32, as vLLM's CPU kernels want them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder
