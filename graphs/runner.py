"""The loop that runs a graph.

    prompts --edge--> rollout --edge--> reward, ref --edge--> advantage --edge--> [ join ]
                         ^                                                           |
                         |  weights v+1                                   a step's groups, by reference
                         +------------------- update stage <-------------------------+

One step, in order:
    wait      until groups_per_step groups are complete on all input edges of the update stage
    update    all its ranks on their shares of these groups
    publish   the new weights; only then admit as many new prompts as max_staleness allows
    commit    the ledger; the groups are gone from all edges; every `save_every` steps a checkpoint is begun (saver.py)
Stages before the update go on with other groups meanwhile; admission alone decides how far ahead they get. Wherever the
loop waits it looks after the processes (supervisor.py). If one of the update stage dies, a new attempt goes on from the
last checkpoint, as a resumed run does.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from rollstream.graphs.attempt import Attempt
from rollstream.graphs.checkpoint import Checkpoints, Found, RunState, installed_packages
from rollstream.graphs.colocation import GB, with_sharing
from rollstream.graphs.crew import demands, plan_on_cluster
from rollstream.graphs.edge_settings import edge_settings
from rollstream.graphs.graph import Graph
from rollstream.graphs.group_log import GroupLog
from rollstream.graphs.item import Left
from rollstream.graphs.joiner import Joined
from rollstream.graphs.keeper import Keeper
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.options import Resume, RunOptions
from rollstream.graphs.resume import checkpoint_to_resume, compared
from rollstream.graphs.saver import DEATH_S, Saver
from rollstream.graphs.session import connected
from rollstream.graphs.stats import Evaluated, PartMetrics, Step
from rollstream.graphs.step_metrics import Clock, step_metrics
from rollstream.graphs.stop import StopFlag, step_grace_s
from rollstream.graphs.surgery import prepared
from rollstream.graphs.wait import get_all
from rollstream.graphs.watch import Watch
from rollstream.placement import Placement, Plan
from rollstream.stages.errors import CheckpointError, ProcessDied, RollstreamError, StageError

POLL_S = 0.5


def run(
    graph: Graph,
    *,
    steps: int | None,
    placement: Placement | None = None,
    out: str | Path | None = None,
    resume: Resume = "never",
    **options: Any,
) -> Iterator[Step]:
    """Runs `graph` for `steps` steps and yields each as it is done; the caller owns the loop.

    `options` are the further fields of RunOptions. Everything that can be checked without loading a model is checked
    before this returns: ConfigError lists all faults. Leaving the loop early ends the run as its last step ends it,
    with a checkpoint. Errors while running: StageError and PluginError (the first error, with its traceback),
    StalledError (what did not move). Ctrl-C and SIGTERM commit a checkpoint and end the run.

    >>> for step in run(graph, steps=20):                                                       # doctest: +SKIP
    ...     print(step.index, step.metrics["reward/mean"])
    """
    given = RunOptions.of(steps=steps, out=out, resume=resume, **options).overridden(os.environ)
    graph, placement, given = prepared(graph, placement or Placement.auto(), given)
    graph.check()
    if given.dry_run:
        plan = placement.plan(demands(graph, placement))
        size = None if placement.device_gb is None else int(placement.device_gb * GB)
        print(graph, with_sharing(graph, placement, plan, size), "all checks passed", sep="\n\n")  # noqa: T201
        return iter(())
    return _Run(graph, placement, given).steps()


class _Run:
    """One run: what it holds between its steps."""

    def __init__(self, graph: Graph, placement: Placement, options: RunOptions):
        self.graph, self.placement, self.options = graph, placement, options
        self.folder = options.folder(graph.name)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", keep_last=options.keep_last, keep_every=options.keep_every
        )
        self.saver = Saver(self.checkpoints, lambda text: self.watch.message(text))
        self.log = GroupLog(self.folder / "groups.jsonl")
        self.notes: list[str] = []  # about the checkpoint, to be told once the view is there
        self.evaluated: list[Evaluated] = []  # since the last step was given out
        self.furthest_step = self.num_lives_since = 0
        self.found = self._find_checkpoint()

    def steps(self) -> Iterator[Step]:
        with connected(), StopFlag() as stop:
            plan = plan_on_cluster(self.graph, self.placement)
            self.edges = edge_settings(self.graph, self.placement, self.options, self.folder)
            self.watch = Watch(self.graph.name, self.options, stop)
            keeper = Keeper(self.graph, self.options, self.folder, plan, self.found.state if self.found else None)
            status = "FAILED"
            try:
                with self.watch:
                    yield from self._attempts(keeper, plan, stop)
                status = "KILLED" if stop.signal else "FINISHED"
            except GeneratorExit:
                status = "KILLED"
                raise
            finally:
                keeper.finish(status)
            stop.exit()

    def _attempts(self, keeper: Keeper, plan: Plan, stop: StopFlag) -> Iterator[Step]:
        """Attempts until one comes to its end: each goes on from the last checkpoint."""
        self.watch.message(f"{self.graph}\n{self.folder}\nloading models ...")
        if self.found is None:
            shutil.rmtree(self.folder / "journal", ignore_errors=True)  # of a run without a checkpoint
        while True:
            try:
                yield from self._attempt(keeper, plan, stop)
                return
            except ProcessDied as error:
                self._go_back(error)

    def _attempt(self, keeper: Keeper, plan: Plan, stop: StopFlag) -> Iterator[Step]:
        """All actors from their start to their end."""
        self.attempt = Attempt(
            self.graph,
            plan,
            self.placement,
            self.options,
            self.edges,
            self.ledger,
            self.watch,
            self._on_left,
            lambda found: self._on_evaluated(keeper, found),
        )
        try:
            self._start(keeper)
            yield from self._loop(keeper, stop)
            self._finish(keeper, stop)
        except GeneratorExit:
            self._keep_what_is_done(keeper)
            raise
        except ProcessDied:
            raise
        except RollstreamError as error:  # told at once
            self.watch.message(str(error))
            self._keep_what_is_done(keeper)
            raise
        finally:
            self.attempt.stop()

    def _go_back(self, error: ProcessDied) -> None:
        """What the update stage's process held is in the last checkpoint only: the run goes on from there."""
        if self.step > self.furthest_step:
            self.furthest_step, self.num_lives_since = self.step, 0
        self.num_lives_since += 1
        with suppress(ProcessDied):  # a rank that did not write to the end, as told below
            self.saver.settle()
        self.watch.message(str(error))
        if self.num_lives_since > self.options.max_restarts:
            raise error
        lost = self.step
        self.found = self._take_over(self.checkpoints.latest())
        self.watch.message(f"going on from step {self.step}; step {lost} was the last one done")

    def _keep_what_is_done(self, keeper: Keeper) -> None:
        """A checkpoint of what was trained, where the update stage still can."""
        try:
            self.attempt.crew.end_turns()
            self._commit(keeper, wait=True)
        except RollstreamError as second:
            last = self.saver.saved_step
            self.watch.message(f"no checkpoint of step {self.step}, the last is of step {last}: {second}")

    def _start(self, keeper: Keeper) -> None:
        self.attempt.start(self.found.folder if self.found else None, self.step, self.version, self._below())
        for note in self.notes:
            self.watch.message(note)
        self.notes.clear()
        if self.found:
            self.watch.message(f"resumed {self.found.folder} at step {self.step}")
        if self.found or self.num_lives_since:
            self.log.resumed(self.step)
        keeper.describe(self.step)

    def _loop(self, keeper: Keeper, stop: StopFlag) -> Iterator[Step]:
        while self.options.steps is None or self.step < self.options.steps:
            clock = Clock()
            groups = self._wait_for_groups()
            if not groups:
                if not stop.signal and self.options.steps is not None:
                    self.watch.message(f"the prompts ended after {self.step} of {self.options.steps} steps")
                return
            clock.waited = time.monotonic()
            metrics = self._update(groups)
            if metrics is None:
                self.watch.message(f"step {self.step + 1} did not end in time and is given up")
                return
            clock.updated = time.monotonic()
            step = self._commit_step(groups, metrics, clock)
            step = self._save_if_due(keeper, step)
            keeper.step(step, groups[0], self.attempt.crew.edges)
            self.watch.step(step)
            del groups  # their rows need not outlive the step
            yield self._with_evaluations(step)
            self.watch.moved()
            if step.index != self.options.steps:
                self.attempt.evaluations.look()  # an error of theirs costs no step that is done, nor the export
            if stop.signal:
                return

    def _wait_for_groups(self) -> list[Joined]:
        """A step's groups; fewer only where the prompts have ended, none where the run is to stop."""

        def look() -> bool:
            self.saver.look()
            self.attempt.look(self.version)
            return not self.watch.stop.signal

        self.attempt.crew.wake()
        groups = self.attempt.feed.wait(POLL_S, look)
        if self.attempt.joiner.ended:
            self.attempt.settle()
        return groups

    def _update(self, groups: Sequence[Joined]) -> dict[str, float] | None:
        """One step on all ranks; its metrics, or None where a stop signal came and the step did not end in time."""
        allowed = self.graph.weights.max_staleness if self.graph.weights else self.version
        late = [g.group_id for g in groups if self.version - g.version > allowed]
        assert not late, f"groups {late} are more than {allowed} versions old"
        self.attempt.crew.rest()
        self.busy = True
        calls = self.attempt.feed.begin(self.step + 1, groups)
        pending = calls
        give_up: float | None = None
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            try:
                get_all(done, self.graph.update.name, timeout_s=POLL_S * 20)
            except StageError:
                self._look_for_a_death()
                raise
            self.saver.look()
            self.attempt.feed.look_ahead(self.step + 2)
            self.attempt.look(self.version, update_is_free=False)
            if self.watch.stop.signal:
                give_up = give_up or time.monotonic() + step_grace_s(os.environ)
                if time.monotonic() > give_up:
                    return None
        return step_metrics(get_all(calls, self.graph.update.name, timeout_s=60), groups)

    def _look_for_a_death(self) -> None:
        """A rank that dies makes those that work with it raise, often before its own death is known: then that is what
        has happened. Raises ProcessDied."""
        give_up = time.monotonic() + DEATH_S
        while self.graph.update.num_ranks > 1 and time.monotonic() < give_up:
            self.attempt.look(self.version, update_is_free=False)
            time.sleep(POLL_S)

    def _commit_step(self, groups: Sequence[Joined], metrics: dict[str, float], clock: Clock) -> Step:
        """The weights go out, more prompts may come, the groups are closed."""
        staleness = tuple(self.version - g.version if self.graph.weights else 0 for g in groups)
        self.log.trained(self.step + 1, groups, staleness)
        self.version += 1
        self.attempt.publish(self.version, self.step + 1)
        metrics |= clock.metrics(metrics["step/tokens"])
        self.step += 1
        self.busy = False
        orders = [g.order for g in groups]
        self.ledger.commit(orders)
        self.attempt.trained(orders)
        self.attempt.flow.admit(self._below())
        self.attempt.evaluations.begin(self.step, self.version)
        metrics["rollout/staleness"] = sum(staleness) / len(staleness)
        metrics["step/left_groups"] = float(len(self.ledger.left))
        return Step(index=self.step, version=self.version, metrics=metrics, staleness=staleness)

    def _below(self) -> int:
        """The order below which prompts may be dispatched: as far as staleness allows, and never more than the run will
        train."""
        num_groups = self.graph.admitted(self.version)
        if self.options.steps is not None:
            num_groups = min(num_groups, self.options.steps * self.graph.update.groups_per_step)
        return self.ledger.below(num_groups)

    def _on_left(self, left: Left) -> None:
        """Another group takes its place."""
        self.log.left(left)
        if left.kind == "quarantined":
            self.watch.message(f"group {left.group_id} is set aside in {self.folder / 'quarantine'}: {left.reason}")
        self.attempt.flow.admit(self._below())

    def _on_evaluated(self, keeper: Keeper, found: Evaluated) -> None:
        """At the step whose weights they are of, which may be long over."""
        keeper.evaluated(found)
        self.watch.evaluated(found)
        self.evaluated.append(found)

    def _with_evaluations(self, step: Step) -> Step:
        """The step with those that were done since the step before; the last step waits for all. Their errors wait
        until it is given out and the model exported."""
        if step.index == self.options.steps:
            with suppress(RollstreamError):  # `_finish` meets it again
                self._wait_for_evaluations()
        found, self.evaluated = tuple(self.evaluated), []
        return dataclasses.replace(step, evaluations=found)

    def _wait_for_evaluations(self) -> None:
        """Each has a deadline of its own; a signal gives them up."""
        while not self.watch.stop.signal:
            self.attempt.evaluations.look()
            if not self.attempt.evaluations.wait(POLL_S):
                return
            self.watch.moved()
            self.watch.look()

    def _finish(self, keeper: Keeper, stop: StopFlag) -> None:
        self.attempt.crew.end_turns()
        self._commit(keeper, wait=True)
        if self.saver.saved_step != self.step and not self.busy and self.options.save_every is not None:
            raise CheckpointError(
                f"step {self.step}, the last, could not be saved: the last checkpoint is of step "
                f"{self.saver.saved_step}. Make room and resume"
            )
        if self.options.export and not stop.signal:
            self.attempt.crew.export(self.folder / "model")
            self.watch.message(f"model for transformers: {self.folder / 'model'}")
        self._wait_for_evaluations()
        keeper.catch_up()
        self.watch.message(keeper.where())

    def _save_if_due(self, keeper: Keeper, step: Step) -> Step:
        last, every = self.step == self.options.steps, self.options.save_every
        if every is not None and (last or self.step % every == 0 or self.saver.failures):
            self._commit(keeper, wait=last)
        metrics = {**step.metrics, "checkpoint/failed": float(self.saver.take_failures())}
        if self.options.until is not None:
            metrics = PartMetrics(metrics)
        return dataclasses.replace(step, checkpoint=self.saver.take_published(), metrics=metrics)

    def _commit(self, keeper: Keeper, *, wait: bool) -> None:
        """Begins a checkpoint of the last finished step, unless there is one or a step is half done, once the one under
        way is published; with `wait` until this one is, too. The next step tries again where it fails."""
        if self.options.save_every is None:
            return
        try:
            self.saver.settle()
            if self.step != self.saver.saved_step and not self.busy:
                self.saver.begin(
                    self.step,
                    lambda: self._state(keeper.run_id, self.ledger.to_json(self.attempt.flow.under_way())),
                    self.attempt.crew.begin_save,
                )
            if wait:
                self.saver.settle()
        finally:
            self.watch.moved()

    def _state(self, tracking_run: str | None, ledger: Mapping[str, Any]) -> RunState:
        return RunState(
            step=self.step,
            version=self.version,
            ledger=ledger,
            data=self.graph.source.fingerprint(),
            graph=self.graph.drawing,
            settings={s: {k: str(v) for k, v in kv.items()} for s, kv in self.graph.settings().items()},
            packages=installed_packages(),
            tracking_run=tracking_run,
        )

    def _find_checkpoint(self) -> Found | None:
        """The checkpoint to go on from, whose step, version and ledger this run takes over."""
        found = checkpoint_to_resume(self.checkpoints, self.options.resume)
        self._take_over(found)
        if found is not None:
            self.notes += compared(found, self._state(None, {}))
        return found

    def _take_over(self, found: Found | None) -> Found | None:
        """Step, version and ledger of a checkpoint, or of the beginning."""
        self.step = found.state.step if found else 0
        self.version = found.state.version if found else 0
        self.ledger = Ledger.from_json(found.state.ledger) if found else Ledger()
        self.saver.go_on_from(self.step)
        self.busy = False  # the update stage is between a step's halves: nothing may be saved
        return found
