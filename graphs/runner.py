"""The loop that runs a graph.

    prompts --edge--> rollout --edge--> reward, ref --edge--> advantage --edge--> [ join ]
                         ^                                                           |
                         |  weights v+1                                   a step's groups, by reference
                         +------------------- update stage <-------------------------+

One step, in order:
    wait      until groups_per_step groups are complete on all input edges of the update stage
    update    all its ranks on their shares of these groups
    publish   the new weights; only then admit as many new prompts as max_staleness allows
    commit    ledger, acks, and every `save_every` steps a checkpoint
Stages before the update go on with other groups meanwhile; admission alone decides how far ahead they get.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from rollstream.graphs.checkpoint import Checkpoints, RunState, check_same_run
from rollstream.graphs.crew import Crew, balance, demands, plan_on_cluster
from rollstream.graphs.graph import Graph
from rollstream.graphs.joiner import Joined, Joiner
from rollstream.graphs.keeper import Keeper
from rollstream.graphs.ledger import Ledger
from rollstream.graphs.options import Resume, RunOptions
from rollstream.graphs.session import connected
from rollstream.graphs.stats import Step
from rollstream.graphs.stop import StopFlag
from rollstream.graphs.wait import get_all
from rollstream.graphs.watch import Watch
from rollstream.placement import Placement
from rollstream.stages.base import Metrics
from rollstream.stages.errors import CheckpointError, RollstreamError

#: A step in flight gets so long to end after a stop signal; then the run ends without it.
GRACE_S = 20.0
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
    graph.check()
    placement = placement or Placement.auto()
    if given.dry_run:
        print(graph, placement.plan(demands(graph, placement)), "all checks passed", sep="\n\n")  # noqa: T201
        return iter(())
    return _Run(graph, placement, given).steps()


class _Run:
    """One run: what it holds between its steps."""

    def __init__(self, graph: Graph, placement: Placement, options: RunOptions):
        self.graph, self.placement, self.options = graph, placement, options
        self.folder = options.folder(graph.name)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep_last=options.keep_last)
        self.step = self.version = 0
        self.ledger = Ledger()
        self.busy = False  # the update stage is between steps' halves: nothing may be saved
        self.found = self._find_checkpoint()
        self.begun_step = self.saved_step = self.step

    def steps(self) -> Iterator[Step]:
        with connected(), StopFlag() as stop:
            plan = plan_on_cluster(self.graph, self.placement)
            self.crew = Crew.start(self.graph, plan, self.placement)
            self.watch = Watch(self.graph, self.crew, self.options, stop)
            keeper = Keeper(self.graph, self.options, self.folder, plan, self.found[1] if self.found else None)
            status = "FAILED"
            try:
                with self.watch:
                    self._start(keeper)
                    yield from self._loop(keeper, stop)
                    self._finish(keeper, stop)
                status = "KILLED" if stop.signal else "FINISHED"
            except GeneratorExit:
                self._commit(keeper)
                status = "KILLED"
                raise
            except RollstreamError as error:
                self._rescue(keeper, error)
                raise
            finally:
                self.crew.stop()
                keeper.finish(status)
            stop.exit()

    def _rescue(self, keeper: Keeper, error: RollstreamError) -> None:
        """Tells the error at once, and keeps what was trained before it where the update stage still can."""
        self.watch.message(str(error))
        try:
            self._commit(keeper)
        except RollstreamError as second:
            self.watch.message(f"no checkpoint of step {self.step}, the last is of step {self.saved_step}: {second}")

    def _start(self, keeper: Keeper) -> None:
        self.watch.message(f"{self.graph}\n{self.folder}\nloading models ...")
        self.crew.set_up()
        if self.found:
            self.crew.load(self.found[0])
            self.watch.message(f"resumed {self.found[0]} at step {self.step}")
        self.crew.publish(self.version)
        self.crew.connect(self.ledger)
        self._admit()
        self.crew.flow()
        keeper.describe()
        self.watch.moved()

    def _loop(self, keeper: Keeper, stop: StopFlag) -> Iterator[Step]:
        update = self.graph.update
        edges = [self.crew.edges[p] for p in self.graph.inputs_of(update.name).values()]
        joiner = Joiner(update.name, edges, at_most=update.groups_per_step, ledger=self.ledger)
        while self.options.steps is None or self.step < self.options.steps:
            begun = time.monotonic()
            groups = self._wait_for_groups(joiner, update.groups_per_step)
            if not groups:
                if not stop.signal and self.options.steps is not None:
                    self.watch.message(f"the prompts ended after {self.step} of {self.options.steps} steps")
                return
            waited = time.monotonic()
            metrics = self._update(groups)
            if metrics is None:
                self.watch.message(f"step {self.step + 1} did not end within {GRACE_S:g} s and is given up")
                return
            updated = time.monotonic()
            self.version += 1
            self.crew.publish(self.version)
            self.step += 1
            self.busy = False
            self._admit()
            self.ledger.commit(g.order for g in groups)
            joiner.ack(groups)
            metrics |= _times(begun, waited, updated, metrics)
            metrics["rollout/staleness"] = _mean([self.version - 1 - g.version for g in groups])
            step = Step(index=self.step, version=self.version, metrics=metrics, checkpoint=self._save_if_due(keeper))
            keeper.step(step, groups[0])
            self.watch.step(step)
            del groups  # their rows need not outlive the step
            yield step
            self.watch.moved()
            if stop.signal:
                return

    def _wait_for_groups(self, joiner: Joiner, wanted: int) -> list[Joined]:
        """A step's groups; fewer only where the prompts have ended, none where the run is to stop."""
        while joiner.poll(POLL_S) < wanted and not joiner.ended:
            self.watch.look()
            if self.watch.stop.signal:
                return []
        return joiner.take(wanted)

    def _update(self, groups: Sequence[Joined]) -> dict[str, float] | None:
        """One step on all ranks; its metrics, or None where a stop signal came and the step did not end in time."""
        staleness = self.graph.weights.max_staleness if self.graph.weights else 0
        late = [g.group_id for g in groups if self.version - g.version > staleness]
        assert not late, f"groups {late} are more than {staleness} versions old"
        self.busy = True
        shares = balance([g.nbytes for g in groups], self.graph.update.data_parallel_size)
        calls = [
            rank.update.remote(self.step + 1, [[i.parts for i in groups[g].items] for g in shares[share]])
            for number, rank in enumerate(self.crew.updaters)
            for share in (self.graph.update.share_of(number),)
        ]
        pending = calls
        give_up: float | None = None
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            get_all(done, self.graph.update.name, timeout_s=POLL_S * 20)
            self.watch.look()
            if self.watch.stop.signal:
                give_up = give_up or time.monotonic() + GRACE_S
                if time.monotonic() > give_up:
                    return None
        sums = Metrics()
        for part in get_all(calls, self.graph.update.name, timeout_s=60):
            sums.merge(part)
        for group in groups:
            sums.merge(group.items[0].metrics)
            for other in group.items[1:]:
                sums.merge({n: m for n, m in other.metrics.items() if n not in group.items[0].metrics})
        self.watch.moved()
        return sums.means() | {"step/groups": float(len(groups)), "step/tokens": sums.sums.get("actor/tokens", (0,))[0]}

    def _admit(self) -> None:
        """As many prompts as may have been dispatched since this run began; never more than the run will train."""
        if self.graph.weights is None:
            return
        per_step = self.graph.update.groups_per_step
        total = self.graph.weights.admitted(self.step - self.begun_step, per_step)
        if self.options.steps is not None:
            total = min(total, (self.options.steps - self.begun_step) * per_step)
        self.crew.admit(total)

    def _finish(self, keeper: Keeper, stop: StopFlag) -> None:
        self._commit(keeper)
        if self.options.export and not stop.signal:
            self.crew.export(self.folder / "model")
            self.watch.message(f"model for transformers: {self.folder / 'model'}")
        self.watch.message(keeper.where())

    def _save_if_due(self, keeper: Keeper) -> str | None:
        due = self.step % self.options.save_every == 0 or self.step == self.options.steps
        return self._commit(keeper) if due else None

    def _commit(self, keeper: Keeper) -> str | None:
        """A checkpoint of the last finished step, unless there is one or a step is half done."""
        if self.step == self.saved_step or self.busy:
            return None
        writing = self.checkpoints.begin(self.step)
        self.crew.save(writing)
        folder = self.checkpoints.publish(writing, self._state(keeper.run_id))
        self.saved_step = self.step
        self.watch.moved()
        self.watch.message(f"checkpoint: {folder}")
        return str(folder)

    def _state(self, tracking_run: str | None) -> RunState:
        return RunState(
            step=self.step,
            version=self.version,
            frontier=self.ledger.frontier,
            ahead=tuple(sorted(self.ledger.ahead)),
            data=self.graph.source.fingerprint(),
            graph=str(self.graph),
            settings={s: {k: str(v) for k, v in kv.items()} for s, kv in self.graph.settings().items()},
            tracking_run=tracking_run,
        )

    def _find_checkpoint(self) -> tuple[Path, RunState] | None:
        """The checkpoint to go on from, whose step, version and ledger this run takes over."""
        resume = self.options.resume
        found = self.checkpoints.latest()
        if resume == "never" and found is not None:
            raise CheckpointError(
                f"{found[0]} is there already: resume it (--resume, or resume='auto'), or give another folder (out=...)"
            )
        if resume == "must" and found is None:
            raise CheckpointError(f"nothing to resume in {self.checkpoints.root}: it has no complete checkpoint")
        if found is not None:
            self.ledger, self.step, self.version = found[1].ledger(), found[1].step, found[1].version
            check_same_run(found[1], self._state(None))
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _times(begun: float, waited: float, updated: float, metrics: dict[str, float]) -> dict[str, float]:
    now = time.monotonic()
    return {
        "time/step_s": now - begun,
        "time/wait_s": waited - begun,
        "time/update_s": updated - waited,
        "time/weights_s": now - updated,
        "time/tokens_per_s": metrics["step/tokens"] / (now - begun),
    }
