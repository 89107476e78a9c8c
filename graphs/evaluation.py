"""What a run is judged by while it trains: prompts that it never trains on, answered and scored.

    held_out = Prompts(Prompts.Config(path="test.jsonl", model=model))
    answers = Rollout(Rollout.Config(model=model, n=1, temperature=0, max_tokens=256))(held_out)
    marks = Reward(Reward.Config(function="math_verify"))(answers)
    graph = Graph("grpo", output=update, weights=..., evaluations=[Evaluation(marks, every=20)])

An evaluation has a process and an engine of its own: it takes the weights of one step whole, and training goes on
meanwhile. What it measures is recorded at that step, however much later it is done.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, cast

from rollstream.graphs.length_faults import length_faults
from rollstream.stages.base import MapStage, RolloutStage, Source, Stage, Stream
from rollstream.stages.errors import WiringError, check_rules

#: Under these names the run's own settings are in its record.
TAKEN = ("graph", "run")


@dataclass(frozen=True)
class Evaluation:
    """A chain of a source, a rollout stage and map stages, `output` its last stream. Each prompt of the source is
    taken once. Its metrics are those of its stages, under its name: "eval/reward/mean".

    While one is under way and the next waits, the object store holds up to two more copies of the weights."""

    output: Stream[Any]
    #: Steps from one evaluation to the next.
    every: int = 10
    #: Of its metrics, and in placements.
    name: str = "eval"
    #: Whether the weights that the run begins with are evaluated too.
    at_start: bool = True
    #: One that takes longer ends the run.
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        given = cast("object", self.output)
        if not isinstance(given, Stream):
            got = type(given).__name__
            raise WiringError(f"an evaluation's output must be a stream (a stage called on a stream), got {got}")
        check_rules(
            [
                (self.every >= 1, f"every must be at least 1, got {self.every}"),
                (self.timeout_s > 0, f"timeout_s must be above 0, got {self.timeout_s}"),
                (self.name.isidentifier(), f"name must be of letters, digits and '_', got {self.name!r}"),
                (
                    self.name not in TAKEN,
                    f"name must not be {self.name!r}, which the run's record uses: call it 'eval'",
                ),
            ]
        )

    @property
    def streams(self) -> tuple[Stream[Any], ...]:
        """Its streams, the source's first."""
        found: list[Stream[Any]] = [self.output]
        while inputs := list(found[0].inputs.values()):
            found.insert(0, inputs[0])
        return tuple(found)

    @property
    def stages(self) -> tuple[Stage[Any, Any], ...]:
        return tuple(stream.stage for stream in self.streams)

    @property
    def num_devices(self) -> int:
        """Devices that its engine needs whole; 1 may be shared."""
        return max(stage.devices_per_rank for stage in self.stages)

    def __str__(self) -> str:
        chain = " -> ".join(stage.name for stage in self.stages)
        return f"{self.name}: {chain} (every {self.every} steps)"

    def settings(self) -> dict[str, Any]:
        """Its own and its stages', for records."""
        return {"every": self.every, "at_start": self.at_start} | {s.name: s.settings() for s in self.stages}

    def is_due(self, step: int) -> bool:
        """Whether the weights after `step` steps are evaluated."""
        return step % self.every == 0 if step else self.at_start

    def faults(self) -> list[str]:
        """Everything wrong with the chain, its stages' settings and their data; loads no model."""
        wiring = [f"{self.name}: {fault}" for fault in self._wiring_faults()]
        own = [f"{self.name}, {stage.name}: {fault}" for stage in self.stages for fault in stage.faults()]
        if wiring or own:
            return wiring + own
        source, rollout = self.stages[:2]
        return [f"{self.name}: {fault}" for fault in length_faults(source, rollout)]

    def _wiring_faults(self) -> list[str]:
        stages = self.stages
        kinds = [Source, RolloutStage, *[MapStage] * (len(stages) - 2)]
        if len(stages) < 2 or not all(isinstance(s, kind) for s, kind in zip(stages, kinds, strict=True)):
            chain = " -> ".join(s.name for s in stages)
            return [f"an evaluation is a source, a rollout stage, then map stages such as Reward; this one is {chain}"]
        faults = [
            f"{s.stage.name} joins {len(s.inputs)} streams ({', '.join(s.inputs)}): an evaluation is one chain"
            for s in self.streams
            if len(s.inputs) > 1
        ]
        faults += [
            f"{stage.name} has {stage.num_ranks} ranks, but an evaluation runs in one process: give it one rank"
            for stage in stages
            if stage.num_ranks > 1
        ]
        if not isinstance(stages[0], Sized):
            faults.append(f"each prompt is taken once, but {stages[0].name} does not know how many it has (__len__)")
        return faults
