"""Whose turn it is on a GPU; without Ray, and no thread waits for longer than a test takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.graphs import turns as module
from rollstream.graphs.attempt import Attempt
from rollstream.graphs.turns import Turns
from rollstream.stages.errors import StalledError


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    return Turns()


def test_an_engine_is_loaded_in_the_engines_turn_only(turns):
    done, order = threading.Event(), []

    def load() -> None:
        with turns.loading():
            order.append("load")
        done.set()

    turns.to_trainer(timeout_s=1)
    turns.to_trainer(timeout_s=1)  # it has its turn already
    threading.Thread(target=load, daemon=True).start()
    assert not done.wait(0.05)
    order.append("trained")
    turns.to_engines()
    assert done.wait(10)
    assert order == ["trained", "load"]


def test_the_trainer_waits_for_an_engine_that_is_being_loaded(turns):
    with turns.loading(), pytest.raises(StalledError, match=r"an engine was loaded for 0\.01 s"):
        turns.to_trainer(timeout_s=0.01)
    turns.to_trainer(timeout_s=1)
    assert turns.trainer


def test_nobody_waits_for_a_turn_once_the_run_is_over(turns):
    turns.to_trainer(timeout_s=1)
    turns.end()
    with pytest.raises(StalledError, match="the run is over"), turns.loading():
        pass


def test_weights_that_are_published_again_have_the_gpu_to_themselves():
    told: list[str] = []
    crew = SimpleNamespace(rest=lambda: told.append("rest"), wake=lambda: told.append("wake"))
    nothing = SimpleNamespace(look=lambda *_: None, must_publish=True)
    attempt: Any = SimpleNamespace(crew=crew, evaluations=nothing, _supervisor=nothing, _watch=nothing)
    attempt._publish = lambda version, arrays: told.append(f"publish {version}")
    Attempt.look(attempt, 3, update_is_free=False)
    assert told == []
    Attempt.look(attempt, 3)
    assert told == ["rest", "publish 3", "wake"]
