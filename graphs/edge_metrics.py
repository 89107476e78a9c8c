"""An edge's counts as Ray metrics: Prometheus finds them beside Ray's own, tagged by edge."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from rollstream.graphs.stats import EdgeStats

#: Versions between the start of a group and its training.
STALENESS_BOUNDS = (0.5, 1.5, 2.5, 4.5, 8.5, 16.5)


class EdgeMetrics:
    """Metrics of one edge; lives in the edge's process."""

    def __init__(self, edge: str):
        tags = {"tag_keys": ("edge",)}
        self._gauges = {
            "groups": Gauge("rollstream_edge_groups", "Groups that the edge holds.", **tags),
            "leased": Gauge("rollstream_edge_leased_groups", "Of these, leased and not acked.", **tags),
            "nbytes": Gauge("rollstream_edge_bytes", "Bytes of their columns that this edge owns.", **tags),
            "oldest_age_s": Gauge("rollstream_edge_oldest_seconds", "Age of the oldest group held.", **tags),
        }
        self._counters = {
            "total_groups": Counter("rollstream_edge_put_groups", "Groups ever put in.", **tags),
            "redelivered": Counter("rollstream_edge_redelivered_groups", "Leases given out again.", **tags),
        }
        self._told = dict.fromkeys(self._counters, 0)
        self._left = Counter("rollstream_edge_left_groups", "Groups filtered or quarantined here.", **tags)
        self._unwritten = Counter("rollstream_edge_unjournalled_groups", "Groups that the journal refused.", **tags)
        self._room_s = Counter("rollstream_edge_wait_room_seconds", "Time in which producers had to wait.", **tags)
        self._lease_s = Counter("rollstream_edge_wait_lease_seconds", "Time in which consumers had to wait.", **tags)
        for metric in (*self._gauges.values(), *self._counters.values(), *self._own()):
            metric.set_default_tags({"edge": edge})

    def _own(self) -> tuple[Counter, ...]:
        return self._left, self._unwritten, self._room_s, self._lease_s

    def tell(self, stats: EdgeStats) -> None:
        """The edge as it is."""
        for name, gauge in self._gauges.items():
            gauge.set(float(getattr(stats, name)))
        for name, counter in self._counters.items():
            total = int(getattr(stats, name))
            if total > self._told[name]:
                counter.inc(total - self._told[name])
                self._told[name] = total

    def unwritten(self) -> None:
        self._unwritten.inc()

    def left(self) -> None:
        self._left.inc()

    def waited_for_room(self, seconds: float) -> None:
        if seconds > 0:
            self._room_s.inc(seconds)

    def waited_for_lease(self, seconds: float) -> None:
        if seconds > 0:
            self._lease_s.inc(seconds)


class RunMetrics:
    """Metrics of the run as a whole and of its stages; lives in the runner's process."""

    def __init__(self, graph: str):
        self._graph = {"graph": graph}
        stage = ("graph", "stage")
        self._busy = Gauge("rollstream_stage_busy_seconds", "Time spent computing.", tag_keys=stage)
        self._waiting = Gauge("rollstream_stage_wait_seconds", "Time spent waiting.", tag_keys=stage)
        self._restarts = Counter("rollstream_stage_restarts", "Processes started again.", tag_keys=stage)
        self._steps = Counter("rollstream_steps", "Steps done.", tag_keys=("graph",))
        self._staleness = Histogram(
            "rollstream_staleness_versions",
            "Versions between the start of a group and its training.",
            boundaries=list(STALENESS_BOUNDS),
            tag_keys=("graph",),
        )

    def stage(self, name: str, busy_s: float, wait_s: float) -> None:
        tags = {**self._graph, "stage": name}
        self._busy.set(busy_s, tags)
        self._waiting.set(wait_s, tags)

    def restart(self, stage: str) -> None:
        self._restarts.inc(1, {**self._graph, "stage": stage})

    def step(self, staleness: list[int]) -> None:
        self._steps.inc(1, self._graph)
        for versions in staleness:
            self._staleness.observe(float(versions), self._graph)
