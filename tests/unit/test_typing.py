"""A stage wired to the wrong stream is marked by pyright, before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pyright")

ROOT = Path(__file__).parents[2]
STAGES = """
from rollstream.stages.advantage import Advantage
from rollstream.stages.prompts import Prompts
from rollstream.stages.reward import Reward
from rollstream.stages.rollout import Rollout

prompts = Prompts(Prompts.Config(path="p.jsonl", model="m"))
rollouts = Rollout(Rollout.Config(model="m", max_tokens=4))(prompts)
scored = Reward(Reward.Config(function="exact_match"))(rollouts)
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What pyright says of two files, under the repository's settings."""
    folder = tmp_path_factory.mktemp("wiring")
    (folder / "right.py").write_text(STAGES + "advantaged = Advantage()(scored)\n")
    (folder / "wrong.py").write_text(
        STAGES + "late = Advantage()(prompts)\nReward(Reward.Config(function='l'))(prompts)\n"
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    settings |= {"include": ["right.py", "wrong.py"], "extraPaths": [str(ROOT / "src")]}
    settings = {name: value for name, value in settings.items() if name not in ("venv", "venvPath")}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=240, check=False).stdout)
    assert said["summary"]["filesAnalyzed"] == 2
    found: dict[str, list[str]] = {"right.py": [], "wrong.py": []}
    for fault in said["generalDiagnostics"]:
        if fault["severity"] == "error":
            found[Path(fault["file"]).name].append(fault["message"])
    return found


def test_pyright_finds_nothing_in_right_wiring(errors):
    assert errors["right.py"] == []


def test_pyright_names_both_schemas_of_wrong_wiring(errors):
    first, second = errors["wrong.py"]
    assert "Stream[Scored]" in first
    assert "Stream[Rollouts]" in second
    assert all('"Prompted"' in message or "Stream[Prompted]" in message for message in (first, second))
