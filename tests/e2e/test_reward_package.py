"""A reward from a package of its own, found by its entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rollstream.stages.reward import Reward
from rollstream.stages.reward.resolve import known_rewards

pytestmark = pytest.mark.e2e

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "shouting-reward"
version = "1"
[project.entry-points."rollstream.rewards"]
shouting = "shouting_reward:shouting"
[tool.setuptools]
py-modules = ["shouting_reward"]
"""
MODULE = """
from rollstream.stages.reward import reward

@reward
def shouting(response, target):
    return float(response == target.upper())
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in sys.path in which the package is installed."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "shouting_reward.py").write_text(MODULE)
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(site), str(source)]
    subprocess.run(command, check=True, timeout=120)
    monkeypatch.syspath_prepend(site)
    return site


def test_an_installed_package_offers_its_reward_by_name(site):
    assert "shouting" in known_rewards()
    assert "shouting_reward" not in sys.modules  # loaded only when named
    stage = Reward(Reward.Config(function="shouting"))
    group = pa.RecordBatch.from_pydict({"sample_id": ["a", "b"], "response": ["HI", "hi"], "target": ['"hi"', '"hi"']})
    assert stage.process(group)["reward"].to_pylist() == [1.0, 0.0]
    stage.close()
