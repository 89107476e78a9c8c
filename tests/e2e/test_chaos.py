"""The soak of benchmarks/chaos.py in its short form: processes of a real run are killed, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.timeout(600)
def test_eight_kills_change_nothing_that_is_trained(script, python):
    process = script(python, CHAOS, "--json", "--kills", "8", "--seed", "3")
    output, errors = process.communicate(timeout=590)
    assert process.returncode == 0, output + errors
    report = json.loads(output.splitlines()[-1])
    missed = {
        name: bar
        for name, bar in report["bars"].items()
        if not bar.get("at_least", float("-inf")) <= bar["value"] <= bar.get("at_most", float("inf"))
    }
    assert not missed, report["results"]
