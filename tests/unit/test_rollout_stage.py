from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rollstream.stages.base import World
from rollstream.stages.errors import ConfigError
from rollstream.stages.rollout import Rollout
from rollstream.stages.schema import Prompted, Rollouts

WORDS = ["<pad>", "<end>", "one", "two", "three", "four"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model over six words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("words")
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def prompt(order: int, ids: list[int]) -> pa.RecordBatch:
    row = {
        "group_id": f"r{order}.e0",
        "order": order,
        "prompt": " ".join(WORDS[i] for i in ids),
        "prompt_ids": ids,
        "target": '"4"',
        "meta": "{}",
    }
    return pa.RecordBatch.from_pylist([row], schema=Prompted.arrow())


@pytest.fixture
def stage(folder: str) -> Rollout:
    stage = Rollout(Rollout.Config(model=folder, n=4, max_tokens=6))
    stage.setup(World(threads=1))
    return stage


def test_run_gives_no_more_groups_at_once_than_may_be_in_flight(folder: str, monkeypatch: pytest.MonkeyPatch):
    stage = Rollout(Rollout.Config(model=folder, n=1, max_tokens=2, groups_in_flight=2))
    stage.setup(World())
    batches: list[int] = []
    generate = stage.engine._generate_batch  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(
        stage.engine, "_generate_batch", lambda b, limits: (batches.append(len(b)), generate(b, limits))[1]
    )
    assert len(list(stage.run(prompt(i, [2]) for i in range(5)))) == 5
    assert batches == [2, 2, 1]


def test_each_prompt_becomes_a_group_of_n_rows(stage):
    groups = list(stage.run([prompt(0, [2, 3]), prompt(1, [4])]))
    assert [g.num_rows for g in groups] == [4, 4]
    assert groups[0].schema.names == list(Rollouts.columns)
    assert groups[1].column("sample_id").to_pylist() == ["r1.e0.0", "r1.e0.1", "r1.e0.2", "r1.e0.3"]
    assert groups[1].column("prompt_ids").to_pylist() == [[4]] * 4


def test_responses_are_decoded_without_special_tokens(stage):
    rows = [row for group in stage.run([prompt(0, [2, 3])]) for row in group.to_pylist()]
    for row in rows:
        assert row["response"] == " ".join(WORDS[i] for i in row["response_ids"] if i > 1)
        assert row["loss_mask"] == [True] * len(row["response_ids"])
        assert row["weight_version"] == [0] * len(row["response_ids"])


def test_metrics_are_sums_over_samples(stage):
    rows = [row for group in stage.run([prompt(0, [2, 3]), prompt(1, [4])]) for row in group.to_pylist()]
    sums = stage.metrics.take()
    num_tokens = sum(len(r["response_ids"]) for r in rows)
    assert sums["rollout/response_tokens"] == (num_tokens, 8)
    assert sums["rollout/truncated"] == (sum(r["finish_reason"] == "length" for r in rows), 8)
    assert sums["rollout/tokens_per_s"][0] == num_tokens
    assert sums["rollout/tokens_per_s"][1] > 0


def test_a_response_of_special_tokens_alone_counts_as_empty(folder):
    every_token = tuple(range(len(WORDS)))
    stage = Rollout(Rollout.Config(model=folder, n=32, max_tokens=6, stop_token_ids=every_token))
    stage.setup(World(threads=1))
    rows = [row for group in stage.run([prompt(0, [2])]) for row in group.to_pylist()]
    empty = sum(row["response_ids"][0] <= 1 for row in rows)
    assert 0 < empty < 32
    assert stage.metrics.take()["rollout/empty"] == (empty, 32)


def test_a_stage_travels_before_setup(folder):
    stage = pickle.loads(pickle.dumps(Rollout(Rollout.Config(model=folder, n=1, max_tokens=2))))
    stage.setup(World(threads=1))
    assert [g.num_rows for g in stage.run([prompt(0, [2])])] == [1]
    stage.close()


def test_every_fault_of_the_settings_is_listed():
    with pytest.raises(ConfigError) as error:
        Rollout.Config(
            model="m", n=0, temperature=-1, top_p=0, top_k=0, max_tokens=0, engine="transformer", dtype="float64"
        )
    assert len(error.value.faults) == 7
    assert "engine is not known, got 'transformer': did you mean 'transformers'?" in str(error.value)


def test_several_samples_at_temperature_zero_are_refused():
    with pytest.raises(ConfigError, match="n must be 1 at temperature 0"):
        Rollout.Config(model="m", n=2, temperature=0, max_tokens=4)


def test_faults_name_a_folder_without_a_model(tmp_path):
    stage = Rollout(Rollout.Config(model=str(tmp_path), max_tokens=4))
    assert "must be a folder with a config.json" in stage.faults()[0]


def test_faults_compare_settings_with_the_model(tmp_path):
    (Path(tmp_path) / "config.json").write_text(json.dumps({"vocab_size": 6, "max_position_embeddings": 32}))
    stage = Rollout(Rollout.Config(model=str(tmp_path), max_tokens=32, stop_token_ids=(5, 6)))
    tokenizer, stop, length = stage.faults()
    assert "must hold a tokenizer" in tokenizer
    assert "below the model's 6 tokens, got [6]" in stop
    assert "below the model's context of 32 tokens, got 32" in length


def test_a_sound_folder_has_no_faults(folder):
    assert Rollout(Rollout.Config(model=folder, max_tokens=4)).faults() == []


def test_importing_the_stage_loads_nothing_heavy():
    code = "import sys, rollstream.stages.rollout; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
