"""The example with a tool, on a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from rollstream import Placement, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator.py"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def calculator():
    spec = importlib.util.spec_from_file_location("calculator", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_to_call_its_tool(calculator, tiny_chat_model, sums, tmp_path, ray_cluster):
    graph = calculator.graph(str(tiny_chat_model), str(sums), lr=5e-3)
    steps = list(run(graph, steps=14, out=tmp_path / "runs/a", placement=Placement.auto(threads=1)))
    rewards = [s.metrics["reward/mean"] for s in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    assert steps[0].metrics["rollout/turns"] == 3.0
    assert max(s.metrics["rollout/logprob_diff"] for s in steps) <= 1e-4
