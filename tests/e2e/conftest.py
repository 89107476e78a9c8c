"""A model small enough to train in seconds, prompts for it, and scripts run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.py"


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a chat template."""
    return tiny_model.write_model(tmp_path_factory.mktemp("tiny_chat_model"))


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen prompts with answers, as JSON lines."""
    return tiny_model.write_sums(tmp_path_factory.mktemp("sums") / "sums.jsonl")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """script(*command): started in tmp_path, its output piped; ended with the test if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start  # type: ignore[misc]
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=20)


@pytest.fixture
def python() -> str:
    return sys.executable
