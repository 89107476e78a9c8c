"""What the runner knows of a running graph, as plain values: no samples, only counts, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.graphs.item import Left


@dataclass(frozen=True, kw_only=True)
class EdgeStats:
    """One edge at one moment. Made by the edge, read by the runner, the watchdog and the live view."""

    name: str  # "rollout -> reward, ref_logprob"
    groups: int  # held: waiting or leased
    leased: int  # of these, leased and not acked
    nbytes: int
    max_groups: int
    max_bytes: int
    oldest_age_s: float  # age of the oldest group held; 0 when empty
    oldest_group: str
    total_groups: int  # ever put in
    redelivered: int
    closed: bool
    left: tuple[Left, ...] = ()  # groups that left the graph here, and are not retired
    overdue: tuple[str, ...] = ()  # holders whose leases ran out


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """One group in one edge. Made by the edge for the ledger."""

    order: int
    group_id: str
    version: int
    consumers: Mapping[str, str]  # waiting | leased | done


@dataclass(frozen=True, kw_only=True)
class StageStats:
    """One stage at one moment, summed over its replicas. Made by the stage hosts."""

    name: str
    busy_s: float  # computing, since the start
    wait_s: float  # waiting for input or for room, since the start
    working_on: str  # group id, or ""
    working_s: float  # for how long


class PartMetrics(dict[str, float]):
    """Metrics of a run that is cut short (`until`). What its missing stages would measure is NaN, so that a script
    written for the whole graph runs.

    >>> PartMetrics({"rollout/empty": 0.5})["reward/mean"]
    nan
    """

    def __missing__(self, name: str) -> float:
        return math.nan


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found with the weights after `step` steps; `seconds` from its beginning to its end.

    `metrics` are means by name, such as "eval/reward/mean".
    """

    name: str
    step: int
    version: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """One finished step, as `run()` yields it. Where the update stage's process died, the run goes on from its last
    checkpoint, and yields the steps since then again.

    `metrics` holds means by name, such as "reward/mean", "rollout/response_tokens", "actor/loss", and the step's
    "time/step_s"; `version` is the weights' version after the step.
    """

    index: int
    version: int
    metrics: Mapping[str, float]
    checkpoint: str | None = None  # the newest, where one became whole since the step before
    staleness: tuple[int, ...] = ()  # of each group: versions between its start and its training
    evaluations: tuple[Evaluated, ...] = ()  # done since the step before; step `steps` waits for all


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that the live view shows."""

    graph: str
    step: int
    steps: int | None
    elapsed_s: float
    metrics: Mapping[str, float] = field(default_factory=lambda: {})
    edges: tuple[EdgeStats, ...] = ()
    stages: tuple[StageStats, ...] = ()
