from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollstream.graphs.options import HOME, OVERRIDES, RunOptions
from rollstream.stages.errors import ConfigError

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch, tmp_path):
    for name in (IN_JOB, HOME):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_command_line_overrides_what_it_names_only():
    options = RunOptions(steps=5, out="a", keep_last=3)
    given = {OVERRIDES: json.dumps({"steps": 9, "resume": "must"})}
    assert options.overridden(given) == RunOptions(steps=9, out="a", keep_last=3, resume="must")
    assert options.overridden({}) == options


def test_an_override_is_checked_as_any_other_value():
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        RunOptions(steps=5).overridden({OVERRIDES: '{"steps": 0}'})


def test_lists_of_the_command_line_become_tuples():
    given = {OVERRIDES: json.dumps({"record": ["rollout"], "replay": ["a.arrows"]})}
    options = RunOptions(steps=5).overridden(given)
    assert (options.record, options.replay) == (("rollout",), ("a.arrows",))


@pytest.mark.parametrize("name", ["record", "replay"])
def test_one_name_in_the_place_of_several_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name} must be a tuple, got 'rollout': write \('rollout',\)"):
        RunOptions(steps=5, **{name: "rollout"})


def test_every_bad_value_is_listed():
    with pytest.raises(ConfigError) as caught:
        RunOptions(steps=0, save_every=0, keep_last=-1, keep_every=0, samples_every=0, stall_s=0, resume="yes")  # type: ignore[arg-type]
    assert caught.value.faults == [
        "steps must be at least 1, got 0",
        "save_every must be at least 1, got 0",
        "keep_last must be at least 1, got -1",
        "keep_every must be at least 1, got 0",
        "samples_every must be at least 1, got 0",
        "stall_s must be above 0, got 0",
        "resume must be 'never', 'auto' or 'must', got 'yes'",
    ]


def test_no_number_of_steps_means_until_the_prompts_end():
    assert RunOptions(steps=None).steps is None


def test_no_keep_every_keeps_none_for_ever():
    assert RunOptions(steps=1).keep_every is None
    assert RunOptions(steps=1, keep_every=1).keep_every == 1


def test_the_folder_is_named_by_the_graph_where_none_is_given(tmp_path):
    assert RunOptions(steps=1).folder("grpo") == tmp_path / "runs/grpo"


def test_a_relative_folder_is_taken_from_here(tmp_path):
    assert RunOptions(steps=1, out="mine/a").folder("grpo") == tmp_path / "mine/a"


def test_a_home_folder_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert RunOptions(steps=1, out="~/a").folder("grpo") == Path("/home/me/a")


@pytest.mark.parametrize("home", ["/shared", None])
def test_in_a_job_a_relative_folder_outlives_the_job(monkeypatch, home):
    monkeypatch.setenv(IN_JOB, "{}")
    monkeypatch.setenv("HOME", "/home/me")
    if home:
        monkeypatch.setenv(HOME, home)
    base = Path(home or "/home/me/rollstream")
    assert RunOptions(steps=1).folder("grpo") == base / "runs/grpo"
    assert RunOptions(steps=1, out="/data/a").folder("grpo") == Path("/data/a")
