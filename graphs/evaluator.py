"""The process of one evaluation: all its stages, one after another, on all its prompts, with one version of the
weights."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Generator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa
from ray.exceptions import ObjectLostError

from rollstream.graphs.evaluation import Evaluation
from rollstream.graphs.wait import get_all
from rollstream.graphs.weights import Published
from rollstream.stages.base import Filtered, MapStage, Metrics, RolloutStage, Source, World
from rollstream.stages.errors import EngineDied, StageError
from rollstream.stages.schema import join_columns

#: How long one object may take to come.
FETCH_S = 600.0


class Evaluator:
    """Ray actor. A process that was started again sets itself up with its next call."""

    def __init__(self, evaluation: Evaluation, threads: int):
        self._evaluation = evaluation
        self._is_set_up = False
        self._threads = threads or os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(self._threads)  # Ray says 1; math libraries read it when first loaded

    def hello(self) -> None:
        """Answers: the process is there."""

    def setup(self) -> None:
        """Loads all stages."""
        for stage in () if self._is_set_up else self._evaluation.stages:
            with self._blamed(stage.name, "set-up"):
                stage.setup(World(threads=self._threads))
        self._is_set_up = True

    def evaluate(self, weights: Published) -> dict[str, float] | None:
        """Metrics of these weights: those of the stages, and `reward/best`, the mean over prompts of the best reward
        among a prompt's samples, where there are several; None where the weights are gone with the process that had
        them. Raises EngineDied, StageError."""
        self.setup()
        source, rollout, *maps = self._evaluation.stages
        assert isinstance(source, Source)
        assert isinstance(rollout, RolloutStage)
        try:
            buckets = get_all(weights.buckets, f"weights of version {weights.version}", timeout_s=FETCH_S)
        except ObjectLostError:
            return None
        with self._blamed(rollout.name, f"weights {weights.version}"):
            rollout.load_weights(weights.version, (pair for bucket in buckets for pair in bucket))
        del buckets
        metrics = Metrics()
        with self._blamed(rollout.name, "rollouts"):
            prompts = itertools.islice(source.rows(frozenset(), 0), len(cast("Sized", source)))
            for group in rollout.run(prompts, timeout_s=self._evaluation.timeout_s):
                best = _best_reward(self._through(cast("list[MapStage[Any, Any]]", maps), group))
                if best is not None:
                    metrics.add("reward/best", best)
        for stage in self._evaluation.stages:
            metrics.merge(stage.metrics.take())
        return metrics.means()

    def _through(self, maps: Sequence[MapStage[Any, Any]], group: pa.RecordBatch) -> pa.RecordBatch | None:
        """The group with all columns, or None where a stage filters it."""
        for stage in maps:
            with self._blamed(stage.name, group.column("group_id")[0].as_py()):
                part = stage.run(group)
            if isinstance(part, Filtered):
                return None
            group = join_columns([group, part])
        return group

    @contextmanager
    def _blamed(self, stage: str, subject: str) -> Generator[None]:
        """An error goes on as a StageError of this stage, with its own traceback."""
        try:
            yield
        except (StageError, EngineDied):
            raise
        except BaseException as error:  # noqa: BLE001 - the process boundary: carried on, whole
            what = "".join(traceback.format_exception(error))
            raise StageError(f"{self._evaluation.name}.{stage}", subject, what) from None


def _best_reward(group: pa.RecordBatch | None) -> float | None:
    if group is None or group.num_rows < 2 or "reward" not in group.schema.names:
        return None
    return max((r for r in group.column("reward").to_pylist() if r is not None), default=None)
