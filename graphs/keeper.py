"""Sends what is worth keeping to the tracker, which runs in an actor of its own: recording never holds up a step.

A tracker that fails while the run goes on is told of once and the run goes on without it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rollstream.graphs import actors
from rollstream.graphs.checkpoint import RunState
from rollstream.graphs.fetch import fetch
from rollstream.graphs.graph import Graph
from rollstream.graphs.item import Item
from rollstream.graphs.joiner import Joined
from rollstream.graphs.options import RunOptions
from rollstream.graphs.settings import redact_text
from rollstream.graphs.stats import Evaluated, Step
from rollstream.graphs.tracking import SAMPLE_COLUMNS, Tracker, default_uri
from rollstream.graphs.wait import get
from rollstream.placement import Plan
from rollstream.stages.errors import RollstreamError

START_S = 300.0
FINISH_S = 120.0
#: The rows of a sample table are few.
CATCH_UP_S = 20.0


class TrackerHost:
    """The tracker's actor; it alone writes the run, and reads the rows of a sample table itself."""

    def __init__(self, uri: str, experiment: str):
        self._tracker = Tracker(uri, experiment)

    def start(self, name: str, params: Mapping[str, object], run_id: str | None, done_steps: int) -> str:
        return self._tracker.start(name, params, {}, run_id, done_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(step, metrics)

    def text(self, artifact_file: str, text: str) -> None:
        self._tracker.text(artifact_file, text)

    def resumed(self, step: int) -> None:
        self._tracker.resumed(step)

    def samples(self, step: int, item: Item, edges: Mapping[str, Any]) -> None:
        group = fetch(item, edges, timeout_s=FINISH_S)
        names = [n for n in SAMPLE_COLUMNS if n in group.schema.names]
        self._tracker.samples(step, group.select(names).to_pylist())

    def finish(self, status: Any) -> None:
        self._tracker.finish(status)


class Keeper:
    """The runner's side of the tracker."""

    def __init__(self, graph: Graph, options: RunOptions, folder: Path, plan: Plan, resumed: RunState | None):
        self.uri = options.tracking_uri or default_uri(folder.parent)
        self.run_id: str | None = resumed.tracking_run if resumed else None
        self._graph, self._options, self._plan = graph, options, plan
        self._actor = actors.start(TrackerHost, self.uri, graph.name)
        self._calls: list[Any] = []
        self._failed = self._described = False
        self._started = self._actor.start.remote(
            folder.name,
            {
                **graph.settings(),
                **{e.name: e.settings() for e in graph.evaluations},
                "run": vars(options) | {"out": str(folder), "tracking_uri": self.uri},
            },
            self.run_id,
            resumed.step if resumed else 0,
        )

    def describe(self, step: int) -> None:
        """Waits for the tracker to be up and keeps the drawing and the placement; where that was done, marks that the
        run went back to `step`. A tracker that cannot start is an error: better now than a run without a record."""
        if self._described:
            self._call(self._actor.resumed.remote(step))
            return
        self._described = True
        self._failed = True  # told by the error that this raises, not once more at the end
        self.run_id = get(self._started, "the tracker's start", timeout_s=START_S)
        self._failed = False
        self._call(self._actor.text.remote("graph.txt", f"{self._graph}\n\n{self._plan}\n"))

    def step(self, step: Step, group: Joined, edges: Mapping[str, Any]) -> None:
        """A step's metrics, and now and then a table of one of its groups."""
        self._call(self._actor.log.remote(step.index, dict(step.metrics)))
        if step.index % self._options.samples_every == 0 or step.index == 1:
            item = max(group.items, key=lambda item: len(item.parts))
            self._call(self._actor.samples.remote(step.index, item, edges))

    def evaluated(self, found: Evaluated) -> None:
        """An evaluation's metrics, at its own step."""
        self._call(self._actor.log.remote(found.step, {**found.metrics, f"{found.name}/seconds": found.seconds}))

    def catch_up(self) -> None:
        """Waits until the tracker has what it was sent: it reads samples from edges that end with the run."""
        self._settle(CATCH_UP_S)

    def finish(self, status: str) -> None:
        """Everything sent is written, the run marked as ended: also one whose stages never came up."""
        self._call(self._actor.finish.remote(status))
        self._settle(FINISH_S)
        actors.end(self._actor)

    def where(self) -> str:
        """How to look at the record."""
        return f"mlflow ui --backend-store-uri {redact_text(self.uri)}   (run {self.run_id})"

    def _call(self, call: Any) -> None:
        self._calls.append(call)
        self._settle(0)

    def _settle(self, timeout_s: float) -> None:
        done, self._calls = ray.wait(self._calls, num_returns=len(self._calls), timeout=timeout_s)
        for call in done:
            try:
                get(call, "the tracker", timeout_s=1)
            except (RayError, RollstreamError) as error:
                if not self._failed:
                    print(f"rollstream: the tracker failed, the run goes on: {error}", file=sys.stderr)  # noqa: T201
                self._failed = True
