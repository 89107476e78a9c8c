"""Engines of real vLLM on tiny models; one engine for all tests that leave it as it was."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
from small_engines import greedy, make_engine, save_model, weights


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models "a" and "b" with tied embeddings, "untied" and "other" without."""
    root = tmp_path_factory.mktemp("models")
    kinds = {"a": (1, True), "b": (2, True), "untied": (3, False), "other": (4, False)}
    return {name: save_model(root / name, seed=seed, tied=tied) for name, (seed, tied) in kinds.items()}


@pytest.fixture(scope="session")
def fresh(folders) -> dict[str, list[int]]:
    """What an engine says that was loaded with the weights of "b"."""
    engine = make_engine(folders["b"])
    said = greedy(engine)
    engine.close()
    return said


class Shared:
    """The engine that tests share, from the first that asks for it to the last of this folder."""

    engine: Any = None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if Shared.engine is not None and (nextitem is None or nextitem.path.parent != item.path.parent):
        Shared.engine.close()
        Shared.engine = None


@pytest.fixture
def engine(folders):
    """The shared engine, with the weights of "a"."""
    shared = Shared.engine = Shared.engine or make_engine(folders["a"])
    if shared.version != 0:
        shared.load_weights(0, weights(folders["a"]))
    shared.updates = "resume"
    return shared
