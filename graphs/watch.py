"""Eyes on a running graph: the live view, and the watchdog that ends a run in which nothing moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import ray

from rollstream.graphs.crew import Crew
from rollstream.graphs.edge_metrics import RunMetrics
from rollstream.graphs.options import RunOptions
from rollstream.graphs.report import LiveView, evaluated_line
from rollstream.graphs.stats import EdgeStats, Evaluated, Snapshot, StageStats, Step
from rollstream.graphs.stop import StopFlag
from rollstream.graphs.wait import get
from rollstream.stages.errors import ProcessDied, StalledError

LOOK_EVERY_S = 1.0
#: Reading an answer that is there already.
CALL_S = 10.0


class Watch:
    """Asks edges and hosts for their counts about once a second, without ever waiting for them."""

    def __init__(self, graph: str, options: RunOptions, stop: StopFlag):
        self.stop = stop
        self._graph, self._options = graph, options
        self._metrics_of_run = RunMetrics(graph)
        self._crew: Crew | None = None
        self._on_edge: Callable[[EdgeStats], None] = lambda stats: None
        self._view = LiveView()
        self._begun = self._moved = time.monotonic()
        self._looked = 0.0
        self._told_stop = False
        self._asked: dict[Any, tuple[str, str, int]] = {}  # open call -> what, name, number of the actor
        self._edges: dict[str, EdgeStats] = {}
        self._stages: dict[str, dict[int, StageStats]] = {}
        self._metrics: Mapping[str, float] = {}
        self._step = 0

    def __enter__(self) -> Watch:
        self._view.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._view.__exit__(kind, error, at)

    def follow(self, crew: Crew, on_edge: Callable[[EdgeStats], None]) -> None:
        """From now on looks at this crew; `on_edge` gets what each edge says."""
        self._crew, self._on_edge = crew, on_edge
        self._asked.clear()
        self._edges.clear()
        self._stages.clear()
        self.moved()

    def restarted(self, stage: str) -> None:
        self._metrics_of_run.restart(stage)
        self.moved()

    def message(self, text: str) -> None:
        self._view.message(text)

    def step(self, step: Step) -> None:
        self._step, self._metrics = step.index, step.metrics
        self._view.step(step)
        self._metrics_of_run.step(list(step.staleness))
        self.moved()

    def evaluated(self, found: Evaluated) -> None:
        self._view.message(evaluated_line(found))
        self.moved()

    def moved(self) -> None:
        """Something went forward."""
        self._moved = time.monotonic()

    def look(self) -> None:
        """Takes in what has been answered, asks again, shows it. Raises StalledError past the stall limit."""
        now = time.monotonic()
        if self.stop.signal and not self._told_stop:
            self._told_stop = True
            self.message("stopping; a second signal ends the run at once")
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        self._take()
        self._ask()
        self._view.show(self._snapshot(now))
        if now - self._moved > self._options.stall_s:
            raise StalledError(self._explain(now - self._moved))

    def _ask(self) -> None:
        waiting = set(self._asked.values())
        if self._crew is None:
            return
        for producer, edge in self._crew.edges.items():
            if (key := ("edge", producer, 0)) not in waiting:
                self._asked[edge.stats.remote()] = key
        for name, replicas in self._crew.hosts.items():
            for number, host in enumerate(h for replica in replicas for h in replica):
                if (key := ("stage", name, number)) not in waiting:
                    self._asked[host.stats.remote()] = key

    def _take(self) -> None:
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for call in done:
            kind, name, number = self._asked.pop(call)
            try:
                answer = get(call, f"the edge after {name}" if kind == "edge" else name, timeout_s=CALL_S)
            except ProcessDied:
                continue  # the supervisor sees to that
            if kind == "edge":
                before = self._edges.get(name)
                if before is None or answer.total_groups != before.total_groups:
                    self.moved()
                self._edges[name] = answer
                self._on_edge(answer)
            else:
                self._stages.setdefault(name, {})[number] = answer
        for stage in self._snapshot(0).stages:
            self._metrics_of_run.stage(stage.name, stage.busy_s, stage.wait_s)

    def _snapshot(self, now: float) -> Snapshot:
        return Snapshot(
            graph=self._graph,
            step=self._step,
            steps=self._options.steps,
            elapsed_s=now - self._begun,
            metrics=self._metrics,
            edges=tuple(self._edges.values()),
            stages=tuple(_summed(name, ranks) for name, ranks in self._stages.items()),
        )

    def _explain(self, still_s: float) -> str:
        lines = [f"nothing moved for {still_s:.0f} s (stall_s={self._options.stall_s:g})"]
        lines += [
            f"stage {s.name} has worked on {s.working_on} for {s.working_s:.0f} s"
            for s in self._snapshot(0).stages
            if s.working_on
        ]
        lines += [
            f"edge {e.name} holds {e.groups} groups ({e.leased} leased), the oldest {e.oldest_group} "
            f"for {e.oldest_age_s:.0f} s"
            for e in self._edges.values()
            if e.groups
        ]
        return "\n  ".join(lines)


def _summed(name: str, ranks: Mapping[int, StageStats]) -> StageStats:
    """All actors of a stage as one."""
    longest = max(ranks.values(), key=lambda r: r.working_s)
    return StageStats(
        name=name,
        busy_s=sum(r.busy_s for r in ranks.values()),
        wait_s=sum(r.wait_s for r in ranks.values()),
        working_on=longest.working_on,
        working_s=longest.working_s,
    )
