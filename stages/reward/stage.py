"""Scores each sample of a group with a function that runs in a process of its own."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rollstream.stages.base import MapStage, World
from rollstream.stages.errors import ConfigError, PluginError
from rollstream.stages.names import known_names
from rollstream.stages.reward.child import Child
from rollstream.stages.reward.outcome import Failure, Outcome, Score
from rollstream.stages.reward.plugin import RewardFunction
from rollstream.stages.reward.resolve import resolve
from rollstream.stages.reward.ship import ship
from rollstream.stages.reward.signature import sample_arguments
from rollstream.stages.schema import Rollouts, Scored

ON_ERROR = ("fail", "abstain")
PARTS = pa.map_(pa.string(), pa.float64())

log = logging.getLogger(__name__)


class Reward(MapStage[Rollouts, Scored]):
    """Adds `reward`, null where the function abstains, and `reward_parts`.

    The function is found when the stage is constructed, and travels with it. It may block, loop for ever or take its
    process down: the sample that overran is counted in `reward/timed_out`, and the next is scored.

    Metrics, a mean over samples each: reward/mean, reward/part/<name>, and the shares reward/timed_out, reward/errors,
    reward/data_errors (those of the errors that are the data's fault) and reward/abstained.

    >>> scored = Reward(Reward.Config(function="exact_match"))(rollouts)  # doctest: +SKIP
    """

    config: Config

    @dataclass(frozen=True, kw_only=True)
    class Config(MapStage.Config):
        """Which function scores, and what happens when it does not."""

        #: A function, the name of a registered one or of an entry point in group rollstream.rewards, or "pkg.mod:fn".
        function: RewardFunction | str
        #: Longest time for a sample in seconds of wall clock; a batch function has it for each sample of the group.
        timeout_s: float = 10.0
        #: Reward of a sample that ran out of time; null leaves the sample without reward.
        timeout_score: float | None = 0.0
        #: What an exception of the function does: "fail" ends the run, "abstain" leaves the sample without reward.
        on_error: str = "fail"
        #: Further arguments of the function, by name.
        params: Mapping[str, Any] = field(default_factory=dict[str, Any])

        def __post_init__(self) -> None:
            faults: list[str] = []
            if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
                faults.append(f"timeout_s must be a finite number above 0, got {self.timeout_s}")
            if self.timeout_score is not None and not math.isfinite(self.timeout_score):
                faults.append(f"timeout_score must be finite, or None for no reward, got {self.timeout_score}")
            if self.on_error not in ON_ERROR:
                faults.append(f"on_error {self.on_error!r} is not known: {known_names(self.on_error, ON_ERROR)}")
            if faults:
                raise ConfigError(faults)

    def __init__(self, config: Config, *, name: str | None = None):
        super().__init__(config, name=name)
        plugin = resolve(self.config.function)
        self._batch = plugin.batch
        self._function_name = self.config.function if isinstance(self.config.function, str) else plugin.where
        self._arguments = sample_arguments(plugin, self.config.params)
        self._payload = ship(plugin, self.config.params)
        self._child: Child | None = None
        #: Traceback of the first error, where errors abstain.
        self.first_error = ""

    def __getstate__(self) -> dict[str, Any]:
        """The function travels as the payload alone, for its module may be missing where the stage goes."""
        config = dataclasses.replace(self.config, function=self._function_name, params={})
        return self.__dict__ | {"config": config, "_child": None}

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"function": self._function_name}

    def setup(self, world: World) -> None:
        self._open().start()

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()

    def process(self, group: pa.RecordBatch) -> Mapping[str, pa.Array]:
        ids: list[str] = group.column("sample_id").to_pylist()
        columns = {name: group.column(name).to_pylist() for name in self._arguments}
        samples = [{name: column[i] for name, column in columns.items()} for i in range(len(ids))]
        outcomes = self._open().score(samples, batch=self._batch)
        scores = [self._settle(sample_id, outcome) for sample_id, outcome in zip(ids, outcomes, strict=True)]
        return {
            "reward": pa.array([score.value for score in scores], pa.float64()),
            "reward_parts": pa.array([list(score.parts.items()) for score in scores], PARTS),
        }

    def _open(self) -> Child:
        if self._child is None:
            self._child = Child(self._payload, stage=self.name, timeout_s=self.config.timeout_s)
        return self._child

    def _settle(self, sample_id: str, outcome: Outcome) -> Score:
        """The score that goes on, by the policies of the config; counts it."""
        if isinstance(outcome, Score):
            score = outcome
        elif isinstance(outcome, Failure):
            if self.config.on_error == "fail":
                raise PluginError(self.name, f"sample {sample_id}", outcome.text)
            if not self.first_error:
                self.first_error = outcome.text
                log.error("stage %r, sample %s has no reward; first error:\n%s", self.name, sample_id, outcome.text)
            score = Score(None, {})
        else:
            score = Score(self.config.timeout_score, {})
            log.warning("stage %r, sample %s: ended after %g s", self.name, sample_id, self.config.timeout_s)
        self._count(score, outcome)
        return score

    def _count(self, score: Score, outcome: Outcome) -> None:
        failed = isinstance(outcome, Failure)
        self.metrics.add("reward/errors", failed)
        self.metrics.add("reward/data_errors", failed and outcome.is_data_error)
        self.metrics.add("reward/timed_out", not failed and not isinstance(outcome, Score))
        self.metrics.add("reward/abstained", isinstance(outcome, Score) and outcome.value is None)
        if score.value is not None:
            self.metrics.add("reward/mean", score.value)
        for name, part in score.parts.items():
            self.metrics.add(f"reward/part/{name}", part)
