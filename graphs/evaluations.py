r"""The runner's side of evaluations: begins those that are due, and takes in what they found, without waiting.

    due -> waits for the one before it -> under way -> done
             \-> left out, where the next is due before it could begin, or its weights are gone

An evaluator that dies is started again by Ray and given the same weights again. One that raises ends the run, like any
stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rollstream.graphs import actors
from rollstream.graphs.evaluation import Evaluation
from rollstream.graphs.stats import Evaluated
from rollstream.graphs.wait import get
from rollstream.graphs.weights import Published
from rollstream.stages.errors import EngineDied, ProcessDied, RollstreamError, StageError, StalledError

#: The weights have just been published: the store has them, unless it died since.
STORE_S = 2.0


@dataclass
class _Line:
    """One evaluation: the step that it is at work on, and the one that waits."""

    evaluation: Evaluation
    actor: Any
    waiting: tuple[int, Published] | None = None
    at_work: tuple[int, Published] | None = None
    call: Any = None
    begun: float = 0.0
    deaths: int = 0  # since it was done last
    is_back: bool = True  # its process answers, as far as is known


class Evaluations:
    """Of one attempt. `done` gets each result once; `tell` messages for the user."""

    def __init__(
        self,
        evaluations: Sequence[Evaluation],
        evaluators: Mapping[str, Any],
        store: Any,
        *,
        max_restarts: int,
        done: Callable[[Evaluated], None],
        tell: Callable[[str], None],
    ):
        self._lines = [_Line(e, evaluators[e.name]) for e in evaluations]
        self._store, self._max_restarts = store, max_restarts
        self._done, self._tell = done, tell
        self._error: RollstreamError | None = None

    def are_due(self, step: int) -> bool:
        return any(line.evaluation.is_due(step) for line in self._lines)

    def begin(self, step: int, version: int) -> None:
        """After each step: takes the weights of `version`, which the store has, for those that are due."""
        due = [line for line in self._lines if line.evaluation.is_due(step)]
        weights = self._weights(version) if due else None
        for line in due:
            if weights is None:
                self._leave_out(line, step, "the weight store lost the weights of this step")
                continue
            if line.waiting is not None:
                too_long = f"an evaluation takes longer than {line.evaluation.every} steps"
                self._leave_out(line, line.waiting[0], f"{too_long}; raise `every`, or give it fewer prompts")
            line.waiting = (step, weights)

    def look(self) -> None:
        """Takes in what is done and begins what waits. Raises StageError, StalledError, and the same again if asked
        again."""
        if self._error is None:
            try:
                self._look()
            except RollstreamError as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        for line in self._lines:
            if line.call is not None:
                self._take(line)
            if line.call is None and line.at_work is None and line.waiting is not None:
                line.at_work, line.waiting, line.begun = line.waiting, None, time.monotonic()
            if line.call is None and line.at_work is not None:
                line.call = line.actor.evaluate.remote(line.at_work[1]) if line.is_back else line.actor.hello.remote()

    def _weights(self, version: int) -> Published | None:
        """Of this version, if the store has them; it may just have died, and wait for others."""
        try:
            call = self._store.latest.remote(version - 1, timeout_s=STORE_S)
            found: Published | None = get(call, "the weight store", timeout_s=2 * STORE_S)
        except (ProcessDied, StalledError):
            return None
        return found if found is not None and found.version == version else None

    def _leave_out(self, line: _Line, step: int, why: str) -> None:
        self._tell(f"{line.evaluation.name} of step {step} is left out: {why}")

    def wait(self, timeout_s: float) -> bool:
        """Whether there is still something to wait for; waits for news of it."""
        if calls := [line.call for line in self._lines if line.call is not None]:
            ray.wait(calls, timeout=timeout_s)
        return any(line.at_work is not None for line in self._lines)

    def end(self) -> None:
        """Tells of those that are given up, for the run ends, or goes back to a checkpoint, before they are done."""
        for line in self._lines:
            for step, _ in filter(None, (line.at_work, line.waiting)):
                self._leave_out(line, step, "the run went on without it before it was done")

    def _take(self, line: _Line) -> None:
        assert line.at_work is not None
        (step, weights), evaluation = line.at_work, line.evaluation
        seconds = time.monotonic() - line.begun
        if not ray.wait([line.call], timeout=0)[0]:
            if seconds > evaluation.timeout_s:
                gone = "" if line.is_back else ": its process died, and is not back"
                limit = f"timeout_s={evaluation.timeout_s:g}"
                raise StalledError(f"{evaluation.name} of step {step} has taken {seconds:.0f} s ({limit}){gone}")
            return
        call, line.call = line.call, None
        try:
            answer: Any = get(call, evaluation.name, timeout_s=1)
        except (ProcessDied, EngineDied) as error:
            if line.is_back:
                self._on_death(line, error)
            return
        if not line.is_back:
            line.is_back = True
            return
        line.at_work, line.deaths = None, 0
        if answer is None:
            self._leave_out(line, step, "its weights died with the update stage")
            return
        metrics = {f"{evaluation.name}/{name}": value for name, value in answer.items()}
        self._done(Evaluated(evaluation.name, step, weights.version, metrics, seconds))

    def _on_death(self, line: _Line, error: RollstreamError) -> None:
        name, line.is_back = line.evaluation.name, False
        line.deaths += 1
        if line.deaths > self._max_restarts:
            times = f"its process died {line.deaths} times (max_restarts={self._max_restarts})"
            raise StageError(name, "", f"{times}. The last time: {error}")
        if isinstance(error, EngineDied):
            actors.restart(line.actor)
        self._tell(f"{name} died and is started again: {str(error).splitlines()[0]}")
