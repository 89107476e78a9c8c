"""The tracker against a real MLflow on SQLite: one store for all tests here, its start takes seconds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.graphs.metric_names import decode, encode
from rollstream.graphs.settings import redact_text
from rollstream.graphs.tracking import MAX_TAG_CHARS, SAMPLE_COLUMNS, Tracker, default_uri
from rollstream.stages.errors import ConfigError

AWKWARD_NAMES = [
    "timing(s)/gen",
    "timing_x28_s_x29_/gen",
    "acc@8 (greedy)",
    "share %",
    "a,b#c",
    "日本/é",
    "/lead",
    "trail/",
    "a//b",
    "a/./b",
    "..",
    ".",
    "",
    " blank ",
    "x" * 300,
    "x" * 299 + "y",
    "(" * 300,
    "a:b\n\0\ud800",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def client(root: Path) -> Any:
    Tracker(default_uri(root), "first").start("first", {})
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=default_uri(root))


@pytest.fixture
def tracker(root: Path, client: Any, request: pytest.FixtureRequest) -> Tracker:
    tracker = Tracker(default_uri(root), request.node.name)
    tracker.start("run", {"lr": 1e-6})
    return tracker


def artifact(client: Any, tracker: Tracker, name: str, folder: Path) -> str:
    return Path(client.download_artifacts(tracker.run_id, name, str(folder))).read_text()


def test_awkward_metric_names_are_taken_and_come_back(tracker: Tracker, client: Any):
    tracker.log(1, {name: float(i) for i, name in enumerate(AWKWARD_NAMES)})
    data = client.get_run(tracker.run_id).data
    assert len(data.metrics) == len(AWKWARD_NAMES)
    short = [name for name in AWKWARD_NAMES if len(name) < 300]
    assert {decode(k) for k in data.metrics} >= set(short)


def test_name_too_long_is_kept_whole_in_a_tag(tracker: Tracker, client: Any):
    tracker.log(1, {"x" * 300: 1.0})
    data = client.get_run(tracker.run_id).data
    (key,) = data.metrics
    assert data.tags[f"rollstream.name.{key[-17:-1]}"] == "x" * 300


@given(st.text(max_size=60))
def test_encoding_is_reversible_and_bounded(name: str):
    assert decode(encode(name, 10_000)) == name
    assert len(encode(name)) <= 250


def test_parameters_are_flattened_and_long_ones_cut_with_a_mark(
    root: Path, client: Any, tracker: Tracker, tmp_path: Path
):
    settings = {"data": {"template": "t" * 7000, "paths": [f"/d/{i}" for i in range(500)]}, "rollout": {"n": 8}}
    settings["many"] = {f"p{i}": i for i in range(250)}
    tracker.start("long", settings)
    params = client.get_run(tracker.run_id).data.params
    assert params["rollout.n"] == "8"
    assert params["data.template"].endswith("t ... [cut]")
    assert len(params) == 253
    assert json.loads(artifact(client, tracker, "settings.json", tmp_path)) == settings


def test_resume_goes_on_with_the_same_run(root: Path, client: Any, tracker: Tracker):
    tracker.finish("KILLED")
    again = Tracker(tracker.uri, tracker.experiment)
    assert again.start("run", {"lr": 1e-6}, run_id=tracker.run_id, done_steps=3) == tracker.run_id
    experiment = client.get_experiment_by_name(tracker.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (tracker.run_id, "RUNNING")


def test_resume_marks_its_steps_and_changed_settings(client: Any, tracker: Tracker):
    again = Tracker(tracker.uri, tracker.experiment)
    again.start("run", {"lr": 5e-7, "new": 1}, run_id=tracker.run_id, done_steps=3)
    again.start("run", {"lr": 1e-6}, run_id=tracker.run_id, done_steps=7)
    data = client.get_run(tracker.run_id).data
    assert data.tags["rollstream.resumed_at"] == "3 7"
    assert data.tags["rollstream.changed_at_3"] == "lr: 1e-06 -> 5e-07"
    assert data.params == {"lr": "1e-06", "new": "1"}


def test_steps_after_a_resume_keep_both_values_and_the_later_counts(client: Any, tracker: Tracker):
    for step in range(1, 6):
        tracker.log(step, {"loss": 1.0})
    again = Tracker(tracker.uri, tracker.experiment)
    again.start("run", {"lr": 1e-6}, run_id=tracker.run_id, done_steps=3)
    for step in range(4, 8):
        again.log(step, {"loss": 2.0})
    history = sorted(client.get_metric_history(tracker.run_id, "loss"), key=lambda m: m.timestamp)
    assert {m.step: m.value for m in history} == dict.fromkeys((1, 2, 3), 1.0) | dict.fromkeys((4, 5, 6, 7), 2.0)
    assert len(history) == 9


def test_resume_of_an_unknown_run_says_where_it_looked(tracker: Tracker):
    with pytest.raises(ConfigError, match="run 'f00' cannot be resumed at sqlite:"):
        tracker.start("run", {}, run_id="f00", done_steps=1)


def test_values_that_are_no_finite_numbers_become_tags_and_are_counted(tracker: Tracker, client: Any):
    broken = {"inf": math.inf, "nan": math.nan, "none": None, "list": [1, 2], "text": "0.5", "big": 10**5000}
    tracker.log(4, {**broken, "surrogate": "\ud800\0", "good": 1, "flag": True, "nested": {"a": {"b": 2.5}}})
    data = client.get_run(tracker.run_id).data
    assert data.metrics == {"good": 1.0, "flag": 1.0, "nested/a/b": 2.5, "tracking/not_logged": 7.0}
    assert data.tags["metric.inf"] == "step 4: inf"
    assert data.tags["metric.text"] == "step 4: 0.5"


def test_array_is_no_number_but_a_scalar_is(tracker: Tracker, client: Any):
    import numpy as np

    tracker.log(1, {"array": np.ones(1), "scalar": np.float32(0.5), "zero_dim": np.array(3)})
    assert client.get_run(tracker.run_id).data.metrics == {"scalar": 0.5, "zero_dim": 3.0, "tracking/not_logged": 1.0}


def test_names_that_meet_are_not_mixed(tracker: Tracker, client: Any):
    tracker.log(1, {"reward/mean": 0.5, "reward": {"mean": 9.0, "parts/reward": 7.0}, "tracking/not_logged": 40.0})
    data = client.get_run(tracker.run_id).data
    assert data.metrics == {"reward/mean": 0.5, "reward/parts/reward": 7.0, "tracking/not_logged": 2.0}
    assert data.tags["metric.reward/mean"] == "step 1: 9.0"


def test_two_trackers_in_one_process_do_not_meet(tracker: Tracker, client: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", tracker.run_id)
    other = Tracker(tracker.uri, tracker.experiment)
    assert other.start("other", {}) != tracker.run_id
    tracker.log(1, {"a": 1.0})
    other.log(1, {"b": 2.0})
    assert client.get_run(tracker.run_id).data.metrics == {"a": 1.0}


def test_secrets_are_nowhere_in_the_store(root: Path, client: Any, tracker: Tracker, tmp_path: Path):
    secret = "hunter2"
    env = {"WANDB_API_KEY": secret, "MY_TOKEN": secret, "TOKENS": {"a": [secret]}}
    settings = {"env_vars": env, "db": f"postgresql://me:{secret}@db/x", "password": secret, "max_tokens": 512}
    tracker.start("s", settings, {"command": f"train --api-key {secret} HF_TOKEN={secret}"})
    tracker.log(1, {"reward": f"https://u:{secret}@host failed"})
    tracker.text("log.txt", json.dumps({"api_key": secret}))
    data = client.get_run(tracker.run_id).data
    kept = str(data.params) + str(data.tags)
    kept += artifact(client, tracker, "settings.json", tmp_path) + artifact(client, tracker, "log.txt", tmp_path)
    assert secret not in kept
    assert data.params["max_tokens"] == "512"


@pytest.mark.parametrize(
    "text", ["tokenizer=Qwen/Qwen3", "sorted(rows, key=len)", "the key: 4", "max_tokens=512", "https://host/a@b"]
)
def test_text_without_secrets_stays(text: str):
    assert redact_text(text) == text


def test_samples_are_a_table_by_step_and_replaced_when_trained_again(
    tracker: Tracker, client: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)  # load_table asks the default store which runs have it
    tracker.samples(10, [{"sample_id": "a-0", "reward": 1.0}, {"sample_id": "a-1", "extra": math.nan}])
    tracker.samples(10, [{"sample_id": "a-0", "reward": 0.5}, {"sample_id": "a-1", "extra": math.nan}])
    table = client.load_table(client.get_run(tracker.run_id).info.experiment_id, "samples/step_000010.json")
    assert table["reward"].tolist()[0] == 0.5
    assert table["sample_id"].tolist() == ["a-0", "a-1"]


def test_samples_are_json_whatever_they_hold(tracker: Tracker, client: Any, tmp_path: Path):
    tracker.samples(
        3, [{"sample_id": "a", "reward": math.nan, "response": "\ud800 é", "ids": [1]}, {"reward": 10**5000}]
    )
    table = json.loads(artifact(client, tracker, "samples/step_000003.json", tmp_path), parse_constant=pytest.fail)
    assert table["columns"] == [*SAMPLE_COLUMNS, "ids"]
    assert table["data"][0] == ["a", None, "\ud800 é", None, "nan", None, "[1]"]


def test_tables_go_on_past_what_a_tag_can_hold(tracker: Tracker, client: Any):
    listed = [{"path": f"samples/step_{i:06d}.json", "type": "table"} for i in range(80)]
    client.set_tag(tracker.run_id, "mlflow.loggedArtifacts", json.dumps(listed))
    tracker.samples(80, [{"sample_id": "a"}])
    tag = client.get_run(tracker.run_id).data.tags["mlflow.loggedArtifacts"]
    assert [t["path"] for t in json.loads(tag)] == [f"samples/step_{i:06d}.json" for i in range(1, 81)]
    assert len(tag) <= MAX_TAG_CHARS


def test_artifacts_lie_beside_the_database(tracker: Tracker, root: Path):
    tracker.text("note.txt", "é")
    assert [p.read_text() for p in root.glob("mlartifacts/*/artifacts/note.txt") if tracker.run_id in str(p)] == ["é"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_finish_sets_the_status(tracker: Tracker, client: Any, status: Any):
    tracker.finish(status)
    assert client.get_run(tracker.run_id).info.status == status


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "sqlite://", "mlruns"])
def test_relative_uri_is_refused_with_the_absolute_one(uri: str):
    with pytest.raises(ConfigError, match=f"write 'sqlite:///{os.getcwd()}"):
        Tracker(uri, "e")


def test_settings_of_any_kind_are_recorded(tracker: Tracker, client: Any):
    config = SimpleNamespace(a=1)
    tracker.start("any", {"path": Path("/d"), "reward": len, "stop": ("a", "b"), "none": None, "odd": config, "e": {}})
    params = client.get_run(tracker.run_id).data.params
    assert params["reward"] == "builtins:len"
    assert params["stop"] == '["a", "b"]'
    assert (params["path"], params["none"], params["e"], params["odd"]) == ("/d", "None", "{}", "namespace(a=1)")


def test_first_start_says_nothing_on_the_terminal(tmp_path: Path):
    code = f"""from rollstream.graphs.tracking import Tracker
t = Tracker("sqlite:///{tmp_path}/new/mlflow.db", "e")
t.start("r", {{}}); t.log(1, {{"a": 1}}); t.samples(1, [{{"sample_id": "x"}}]); t.finish("FINISHED")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
