"""The command line around a script, in this process; no run is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollstream.graphs import cli
from rollstream.graphs.group_log import GroupLog
from rollstream.graphs.item import Left
from rollstream.graphs.options import OVERRIDES

ECHO = "import os, sys; print(os.environ['ROLLSTREAM_RUN'], sys.argv[1:], __name__)"
REFUSED = """
from rollstream.stages.errors import ConfigError
raise ConfigError(["n must be at least 1, got 0", "lr must be above 0, got 0"])
"""
DRY = """
import helper
from rollstream import run
for step in run(helper.graph(), steps=5, out="unused"):
    raise AssertionError("a dry run has no step")
print("the script goes on")
"""
HELPER = """
from rollstream.graphs import Graph, Weights
from rollstream.stages.base import RolloutStage, Source, UpdateStage
from rollstream.stages.schema import Prompted, Rollouts, Trained

class Numbers(Source[Prompted]):
    def rows(self, skip, start): raise NotImplementedError
    def fingerprint(self): return ""

class Sampler(RolloutStage[Prompted, Rollouts]):
    groups_in_flight = 1
    def submit(self, group): raise NotImplementedError
    def finished(self, timeout_s): raise NotImplementedError
    def load_weights(self, version, tensors): raise NotImplementedError

class Train(UpdateStage[Rollouts, Trained]):
    groups_per_step = data_parallel_size = 1
    share_of = update = weights = save = load = export = lambda self, *_: None
    def __call__(self, stream): return self._wire(stream=stream)

def graph():
    rollouts = Sampler()(Numbers())
    output = Train()(rollouts)
    return Graph("tiny", output=output, weights=Weights(output, to=rollouts))
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch, tmp_path):
    """A command sets these for its own process, which is this one."""
    monkeypatch.setenv(OVERRIDES, "{}")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def script(tmp_path: Path):
    def make(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        return str(tmp_path / "script.py")

    return make


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.app, list(args))


def main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    """The exit code of the whole command."""
    monkeypatch.setattr(sys, "argv", ["rollstream", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_options_before_the_script_are_ours_those_after_it_its_own(script):
    done = invoke("run", "--steps", "3", "--resume", script(ECHO), "--lr", "0.1", "fast")
    assert done.output == """{"steps": 3, "resume": "must"} ['--lr', '0.1', 'fast'] __main__\n"""


def test_what_is_not_given_stays_the_scripts(script):
    assert invoke("run", script(ECHO)).output == "{} [] __main__\n"


def test_recordings_and_stages_may_be_given_more_than_once(script):
    given = ["--record", "rollout", "--record", "reward", "--replay", "a.arrows", "--until", "reward"]
    done = invoke("run", *given, script(ECHO))
    assert (
        done.output == """{"record": ["rollout", "reward"], "replay": ["a.arrows"], "until": "reward"} [] __main__\n"""
    )


def test_a_dry_run_of_a_part_shows_that_part(script, tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    done = invoke("run", "--dry-run", "--until", "sampler", script(DRY))
    assert done.exception is None
    assert done.output.startswith("numbers -> sampler -> discard\n\n")


def test_a_recording_that_is_none_is_refused_before_anything_starts(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "helper.py").write_text(HELPER)
    assert main(monkeypatch, "run", "--replay", "none.arrows", script(DRY)) == 1
    assert f"{tmp_path}/none.arrows is no recording: there is no such file" in capsys.readouterr().err


def test_a_dry_run_checks_prints_and_starts_nothing(script, tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    done = invoke("run", "--dry-run", script(DRY))
    assert done.exception is None
    assert "numbers -> sampler -> train" in done.output
    assert "placement (PACK)" in done.output
    assert done.output.endswith("all checks passed\nthe script goes on\n")
    assert not {"unused", "runs"} & set(os.listdir(tmp_path))


def test_an_error_of_ours_is_one_message_and_exit_code_1(monkeypatch, script, capsys):
    assert main(monkeypatch, "run", script(REFUSED)) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "",
        "ConfigError: 2 faults:\n  - n must be at least 1, got 0\n  - lr must be above 0, got 0\n",
    )


def test_an_error_of_the_script_keeps_its_traceback(monkeypatch, script):
    monkeypatch.setattr(sys, "argv", ["rollstream", "run", script("1 / 0")])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(("text", "code"), [("raise KeyboardInterrupt", 130), ("raise SystemExit(143)", 143), ("", 0)])
def test_the_exit_code_tells_how_a_script_ended(monkeypatch, script, text, code):
    assert main(monkeypatch, "run", script(text)) == code


def test_a_script_that_is_not_there_is_refused(tmp_path):
    done = invoke("run", str(tmp_path / "none.py"))
    assert done.exit_code == 2
    assert "does not exist" in " ".join(done.output.replace("│", " ").split())


def test_steps_below_one_are_refused(script):
    assert invoke("run", "--steps", "0", script(ECHO)).exit_code == 2


def test_a_group_is_traced_in_the_newest_run(tmp_path):
    for number, name in enumerate(["new", "old"]):
        log = tmp_path / "runs" / name / "groups.jsonl"
        left = Left(order=3, group_id=f"g3.{name}", kind="filtered", stage="reward", reason="all rewards are equal")
        GroupLog(log).left(left)
        os.utime(log, (100 - number, 100 - number))
    done = invoke("trace", "3")
    assert done.output == "group g3.new, order 3, in runs/new\n\nfiltered at reward: all rewards are equal\n"
    assert invoke("trace", "g3.old", "--out", "runs/old").exit_code == 0


def test_a_trace_without_a_run_says_how_to_name_one(monkeypatch, capsys, tmp_path):
    assert main(monkeypatch, "trace", "3") == 1
    assert (
        capsys.readouterr().err == f"ConfigError: there is no run in {tmp_path}/runs: say where it is (--out FOLDER)\n"
    )


def test_rewards_are_listed():
    assert {"exact_match", "math_verify"} <= set(invoke("rewards").output.split())
