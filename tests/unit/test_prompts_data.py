"""What the prompt source reads, and what it refuses, of data files."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollstream.stages.prompts import Prompts


@pytest.fixture
def prompts(tmp_path: Path, tiny_tokenizer_dir: Path):
    """Makes Prompts from rows (dicts, or lines as text) in a .jsonl file."""

    def make(rows: list[Any], **settings: Any) -> Prompts:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return Prompts(Prompts.Config(**{"path": str(path), "model": str(tiny_tokenizer_dir), "epochs": 1} | settings))

    return make


@pytest.fixture
def from_path(tiny_tokenizer_dir: Path):
    def make(path: Path, **settings: Any) -> Prompts:
        wanted = {"path": str(path), "model": str(tiny_tokenizer_dir), "epochs": 1, "shuffle": False}
        return Prompts(Prompts.Config(**wanted | settings))

    return make


def column(source: Prompts, name: str) -> list[Any]:
    return [group.column(name)[0].as_py() for group in source.rows(frozenset(), 0)]


def targets(source: Prompts) -> list[Any]:
    return [json.loads(text) for text in column(source, "target")]


def test_a_row_keeps_its_own_keys_whatever_its_neighbours_have(prompts):
    plain = {"role": "user", "content": "hi"}
    rows = [{"prompt": [plain], "answer": 1}, {"prompt": [plain | {"tool_calls": [1]}], "answer": 1, "more": 2}]
    source = prompts(rows, shuffle=False)
    assert column(source, "prompt")[0] == "<|user|>hi<|end|><|assistant|>"
    assert column(source, "meta") == ["{}", '{"more": 2}']


def test_null_fields_that_parquet_adds_to_messages_are_not_rendered(tmp_path, from_path):
    plain = {"role": "user", "content": "hi"}
    rows = [{"prompt": [plain], "answer": "1"}, {"prompt": [plain | {"tool_calls": ["f"]}], "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    texts = column(from_path(tmp_path / "rows.parquet"), "prompt")
    assert texts == ["<|user|>hi<|end|><|assistant|>", "<|user|>hi[tools]<|end|><|assistant|>"]


def test_parquet_values_become_plain_python(tmp_path, from_path):
    row = {"prompt": "a", "answer": {"ok": True, "xs": [1, 2]}, "when": datetime.date(2024, 1, 2), "d": Decimal("1.10")}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    source = from_path(tmp_path / "rows.parquet")
    assert targets(source) == [{"ok": True, "xs": [1, 2]}]
    assert json.loads(column(source, "meta")[0]) == {"when": "2024-01-02", "d": "1.10"}


def test_answers_of_mixed_types_keep_their_types(prompts):
    answers = [72, "3/4", True, ["a", "b"], None, {"x": {}}, 0.1]
    assert targets(prompts([{"prompt": "a", "answer": a} for a in answers], shuffle=False)) == answers


def test_big_integers_keep_all_digits(prompts):
    answers = [2**53 + 1, 2**63, 2**64, 12345678901234567890123]
    assert targets(prompts([{"prompt": "a", "answer": a} for a in answers], shuffle=False)) == answers


def test_files_of_a_folder_may_differ_in_type(tmp_path, from_path):
    for name, tags in (("a", []), ("b", ["x"])):
        table = pa.Table.from_pylist([{"prompt": "p", "answer": "1", "extra": {"tags": tags}}])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    metas = [json.loads(m) for m in column(from_path(tmp_path), "meta")]
    assert metas == [{"extra": {"tags": []}}, {"extra": {"tags": ["x"]}}]


def test_reads_a_saved_dataset(tmp_path, from_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]).save_to_disk(
        tmp_path / "d"
    )
    assert targets(from_path(tmp_path / "d")) == [1, 2]


def test_missing_columns_are_named_with_those_there_are(prompts):
    faults = prompts([{"question": "a", "answers": 1}]).faults()
    assert len(faults) == 2
    assert "no prompt column 'prompt'" in faults[0]
    assert "did you mean 'answers'? Known: answers, question" in faults[1]


def test_missing_parquet_column_is_named(tmp_path, from_path):
    pq.write_table(pa.table({"promt": ["a"], "answer": ["b"]}), tmp_path / "rows.parquet")
    assert "did you mean 'promt'?" in from_path(tmp_path / "rows.parquet").faults()[0]


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (None, "'prompt' is null"),
        ("  ", "'prompt' is empty"),
        ([], "'prompt' is an empty list"),
        (7, "'prompt' must be text or a list"),
        (["hi"], "message 1: must be an object"),
        ([{"content": "hi"}], "message 1: role must be text"),
        (user(None), "message 1: content must be text, got null"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_a_bad_prompt_is_named_by_its_row(prompts, bad, said):
    faults = prompts([{"prompt": "fine", "answer": 1}, {"prompt": bad, "answer": 1}]).faults()
    assert len(faults) == 1
    assert faults[0].startswith("row 2 ")
    assert said in faults[0]


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": "a", "answer": NaN}', '{"prompt": "a"}'])
def test_a_bad_line_is_named_by_its_number(prompts, line):
    faults = prompts([{"prompt": "a", "answer": 1}, "", line]).faults()
    assert len(faults) == 1
    assert faults[0].startswith("row 3 ")


def test_values_without_json_form_are_refused(tmp_path, from_path):
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"], "image": [b"x"]}), tmp_path / "rows.parquet")
    assert from_path(tmp_path / "rows.parquet").faults()[0].startswith("row 1 'image': JSON has no form for bytes")


def test_many_bad_rows_fit_one_screen(prompts):
    faults = prompts([{"prompt": None, "answer": 1}] * 25).faults()
    assert len(faults) == 11
    assert faults[-1] == "and 15 more rows like these"


def test_missing_empty_and_unknown_files_are_told_apart(tmp_path, from_path, prompts):
    (tmp_path / "rows.csv").write_text("prompt,answer")
    assert "does not exist" in from_path(tmp_path / "nowhere.jsonl").faults()[0]
    assert "holds no row" in prompts([]).faults()[0]
    assert "must end in .jsonl or .parquet" in from_path(tmp_path / "rows.csv").faults()[0]


def test_a_model_folder_without_config_is_a_fault(prompts):
    faults = prompts([{"prompt": "a", "answer": 1}], model="no/such/model").faults()
    assert any("must hold a config.json" in fault for fault in faults)


def test_faults_of_file_and_model_are_told_together(from_path, tmp_path):
    faults = from_path(tmp_path / "nowhere.jsonl", model="no/such/model").faults()
    assert "does not exist" in faults[0]
    assert "must hold a config.json" in faults[1]
