"""Fixtures for the data and reward stages: a tiny model folder, groups to score, a reward that ends with its test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstream.stages.reward import Reward

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls is defined %}[tools]{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a byte-level tokenizer (one token a byte) that adds `<s>`, a chat template, and a config.json
    with 256 positions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "model_type": "llama"}))
    return folder


@pytest.fixture
def rollouts():
    """Makes a group as a reward sees it, a row for each response; columns that it does not read are left out."""

    def make(responses: list[str], target: object = "yes", meta: object = None) -> pa.RecordBatch:
        rows = range(len(responses))
        return pa.RecordBatch.from_pydict(
            {
                "sample_id": [f"r000001.e0.{i}" for i in rows],
                "response": responses,
                "target": [json.dumps(target)] * len(responses),
                "meta": [json.dumps(meta or {})] * len(responses),
                "response_ids": pa.array([list(range(len(r))) for r in responses], pa.list_(pa.int32())),
            }
        )

    return make


@pytest.fixture
def score(rollouts: Any):
    """Scores responses with a function: gives the rewards and the stage, whose worker ends with the test."""
    stages: list[Reward] = []

    def run(function: Any, responses: list[str], *, target: object = "yes", meta: object = None, **settings: Any):
        stage = Reward(Reward.Config(function=function, **settings))
        stages.append(stage)
        return stage.process(rollouts(responses, target, meta))["reward"].to_pylist(), stage

    yield run
    for stage in stages:
        stage.close()
