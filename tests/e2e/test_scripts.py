"""A user's script: run by python, stopped, killed and resumed, and what it says when it is wrong."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROLLSTREAM = Path(sys.executable).parent / "rollstream"

SCRIPT = """
import json, sys
from rollstream import GRPO, ActorUpdate, Placement, Prompts, Reward, Rollout, grpo, run

model, prompts, function = sys.argv[1:4]
options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}


def share_of_a(response, response_ids):
    return response.count("a") / len(response_ids)


def broken(response, sample_id):
    if sample_id.endswith(".e0.3"):
        raise KeyError("no such unit: furlong")
    return 0.0


graph = grpo(GRPO(
    data=Prompts.Config(path=prompts, model=model, prompt="question", **options),
    rollout=Rollout.Config(model=model, n=4, max_tokens=8),
    reward=Reward.Config(function=globals().get(function, function)),
    actor=ActorUpdate.Config(model=model, groups_per_step=4, lr=3e-3),
))
for step in run(graph, steps=6, out="run", save_every=1, placement=Placement.auto(threads=1)):
    print(json.dumps([step.index, step.metrics["actor/loss"], step.metrics["reward/mean"]]), flush=True)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def lines_of(output: str) -> list[list[float]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("[")]


def test_killed_and_resumed_it_gives_the_same_losses_bit_for_bit(
    script, python, train, tiny_chat_model, sums, tmp_path
):
    whole, errors = script(python, train, tiny_chat_model, sums, "share_of_a").communicate(timeout=150)
    assert len(lines_of(whole)) == 6, errors
    (tmp_path / "run").rename(tmp_path / "first")
    killed = script(python, train, tiny_chat_model, sums, "share_of_a")
    first = [killed.stdout.readline() for _ in range(2)]
    time.sleep(0.3)  # into the third step, wherever that is
    killed.kill()
    killed.wait(timeout=20)
    resumed, errors = script(ROLLSTREAM, "run", "--resume", train, tiny_chat_model, sums, "share_of_a").communicate(
        timeout=150
    )
    rest = lines_of(resumed)
    assert rest, errors
    begun = int(rest[0][0]) - 1
    assert begun >= 1
    assert [json.loads(line) for line in first][:begun] + rest == lines_of(whole)[:2][:begun] + lines_of(whole)[begun:]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_ends_the_run_with_a_checkpoint(script, python, train, tiny_chat_model, sums, tmp_path, number, code):
    process = script(python, train, tiny_chat_model, sums, "share_of_a")
    process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (code, 130), errors
    assert list((tmp_path / "run/checkpoints").glob("step_*/state.json"))


def test_a_reward_that_raises_ends_the_run_with_its_traceback_and_the_sample(
    script, python, train, tiny_chat_model, sums
):
    begun = time.monotonic()
    process = script(python, train, tiny_chat_model, sums, "broken")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    told = re.search(r"stage 'reward' failed on sample (r\d+\.e0\.3)", errors)
    assert told, errors
    assert "KeyError: 'no such unit: furlong'" in errors
    assert "train.py" in errors[: errors.index("KeyError")]  # the plugin's own lines come first
    assert errors.index(told[0]) < 300
    assert time.monotonic() - begun < 75


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        ("exact_mach", {}, r"exact_mach.*exact_match"),
        ("exact_match", {"answer": "solution"}, r"solution.*(answer|question)"),
        ("exact_match", {"path": "nowhere.jsonl"}, r"nowhere\.jsonl"),
        ("exact_match", {"max_prompt_tokens": 3}, r"row 1.*tokens"),
    ],
)
def test_a_mistake_is_told_on_one_screen_before_any_model_loads(
    script, tmp_path, tiny_chat_model, sums, function, options, says
):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("path=prompts, ", "path=options.pop('path', prompts), "))
    process = script(ROLLSTREAM, "run", file, tiny_chat_model, sums, function, json.dumps(options))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(says, errors, re.DOTALL), errors
    assert len(errors.splitlines()) < 25
    assert not (tmp_path / "run").exists()
