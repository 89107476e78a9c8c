"""The order of a run's end, with stand-ins for all that it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollstream.graphs import runner


def test_gpus_are_free_for_the_last_checkpoint_and_the_tracker_has_read_the_edges_before_they_end(monkeypatch):
    events: list[str] = []
    evaluations = SimpleNamespace(wait=lambda timeout_s: False, look=lambda: None)
    crew = SimpleNamespace(end_turns=lambda: events.append("engines end"))
    attempt = SimpleNamespace(crew=crew, stop=lambda: events.append("actors end"), evaluations=evaluations)
    monkeypatch.setattr(runner, "Attempt", lambda *_: attempt)
    keeper: Any = SimpleNamespace(catch_up=lambda: events.append("tracker caught up"), where=lambda: "")
    run: Any = object.__new__(runner._Run)
    run.graph = run.placement = run.edges = run.ledger = None
    run.watch = SimpleNamespace(message=lambda text: None, stop=SimpleNamespace(signal=None))
    run.options = SimpleNamespace(export=False)
    run._start = lambda keeper: None
    run._loop = lambda keeper, stop: iter(())
    run._commit = lambda keeper, wait: events.append("saved")
    run.step, run.busy, run.saver = 1, False, SimpleNamespace(saved_step=1)
    stop: Any = SimpleNamespace(signal=None)
    assert list(run._attempt(keeper, None, stop)) == []
    assert events == ["engines end", "saved", "tracker caught up", "actors end"]
