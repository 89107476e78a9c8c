"""A graph: stages wired by calls, the weight edge, and everything that can be checked before a process starts.

    graph = Graph("grpo", output=update, weights=Weights(update, to=rollouts))
    print(graph)        # the drawing
    graph.check()       # every fault at once, or silence

A graph is a plain value. It knows no node; `run` takes it and a Placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.graphs.discard import Discard
from rollstream.graphs.drawing import draw
from rollstream.graphs.evaluation import Evaluation
from rollstream.graphs.length_faults import length_faults
from rollstream.graphs.weights import Weights
from rollstream.stages.base import RolloutStage, Source, Stage, Stream, UpdateStage
from rollstream.stages.errors import ConfigError, WiringError, check_rules
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.schema import Trained


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much one edge may hold before its producer has to wait."""

    max_groups: int = 256
    #: Of the columns that the edge owns; None: 256 MiB, or less where the edges would fill half of the object store.
    max_bytes: int | None = None
    #: A process that has held a group for so long is taken for hung: it is ended, and the group given out again.
    lease_s: float = 900.0

    def __post_init__(self) -> None:
        given = {"max_groups": self.max_groups, "max_bytes": self.max_bytes, "lease_s": self.lease_s}
        check_rules((v is None or v > 0, f"{name} must be above 0, got {v}") for name, v in given.items())


@dataclass(frozen=True, kw_only=True)
class EdgeSpec:
    """One edge: everybody who takes from one stage."""

    producer: str
    consumers: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.producer} -> {', '.join(self.consumers)}"


class Graph:
    """Stages from a source to an update stage.

    Raises WiringError at once where `output` is not an update stage's stream; everything else waits for `check`.
    """

    def __init__(
        self,
        name: str,
        *,
        output: Stream[Trained],
        weights: Weights | None = None,
        bounds: Bounds | None = None,
        evaluations: Sequence[Evaluation] = (),
    ):
        if not isinstance(getattr(output, "stage", None), UpdateStage):
            got = type(getattr(output, "stage", output)).__name__
            raise WiringError(
                f"a graph's output must be the stream of an update stage, such as ActorUpdate(...)(...); got {got}"
            )
        self.name = name
        self.output = output
        self.weights = weights
        self.bounds = bounds or Bounds()
        self.evaluations = tuple(evaluations)
        self.streams = tuple(_walk(output))

    def __str__(self) -> str:
        return "\n".join([self.drawing, *map(str, self.evaluations)])

    @property
    def drawing(self) -> str:
        """Of what is trained."""
        return draw(self.edges, self.source.name, self.weights)

    @property
    def stages(self) -> dict[str, Stage[Any, Any]]:
        """Stages by name, sources first."""
        return {s.stage.name: s.stage for s in self.streams}

    @property
    def edges(self) -> tuple[EdgeSpec, ...]:
        """One edge for each stage whose output is used."""
        consumers: dict[str, list[str]] = {}
        for stream in self.streams:
            for taken in stream.inputs.values():
                names = consumers.setdefault(taken.stage.name, [])
                if stream.stage.name not in names:
                    names.append(stream.stage.name)
        return tuple(EdgeSpec(producer=p, consumers=tuple(c)) for p, c in consumers.items())

    def admitted(self, version: int) -> int:
        """Groups that may have been dispatched in all while the weights are at `version`. Without a weight edge nothing
        grows old; as many may be under way as an edge holds, so that none waits behind a full one."""
        step = self.update.groups_per_step
        if self.weights is not None:
            return self.weights.admitted(version, step)
        return version * step + max(self.bounds.max_groups, step)

    @property
    def source(self) -> Source[Any]:
        return next(s.stage for s in self.streams if isinstance(s.stage, Source))

    @property
    def update(self) -> UpdateStage[Any, Any]:
        assert isinstance(self.output.stage, UpdateStage)
        return self.output.stage

    @property
    def rollout(self) -> RolloutStage[Any, Any] | None:
        return next((s.stage for s in self.streams if isinstance(s.stage, RolloutStage)), None)

    def inputs_of(self, stage: str) -> Mapping[str, str]:
        """Names of the stages that `stage` takes from, by argument."""
        stream = next(s for s in self.streams if s.stage.name == stage)
        return {argument: taken.stage.name for argument, taken in stream.inputs.items()}

    def settings(self) -> dict[str, dict[str, Any]]:
        """Every stage's settings and the graph's own, for records."""
        own: dict[str, Any] = {"name": self.name, **self.bounds.__dict__}
        if self.weights:
            own["max_staleness"] = self.weights.max_staleness
        return {"graph": own} | {name: stage.settings() for name, stage in self.stages.items()}

    def faults(self) -> list[str]:
        """Everything wrong with the wiring, and with each stage's settings and data."""
        wiring = self._wiring_faults()
        own = [f"{s.stage.name}: {fault}" for s in self.streams for fault in s.stage.faults()]
        own += [*self._evaluation_faults(), *(fault for e in self.evaluations for fault in e.faults())]
        return wiring + own + ([] if own else self._agreement_faults())

    def check(self) -> None:
        """Raises ConfigError listing all faults; loads no model."""
        if faults := self.faults():
            raise ConfigError(faults)

    def _wiring_faults(self) -> list[str]:
        faults: list[str] = []
        names = [s.stage.name for s in self.streams]
        faults += [
            f"two stages are called {n!r}: give one another name, as in Reward(config, name='style_reward')"
            for n in sorted({n for n in names if names.count(n) > 1})
        ]
        sources = [s.stage.name for s in self.streams if isinstance(s.stage, Source)]
        if len(sources) != 1:
            faults.append(f"a graph has one source, this one has {len(sources)}: {', '.join(sources) or 'none'}")
        faults += [
            f"{s.stage.name} takes {len(s.inputs)} streams ({', '.join(s.inputs)}): only an update stage joins streams"
            for s in self.streams
            if len(s.inputs) > 1 and not isinstance(s.stage, UpdateStage)
        ]
        faults += self._weights_faults()
        step = self.update.groups_per_step
        if self.bounds.max_groups < step:
            faults.append(
                f"an edge holds at most {self.bounds.max_groups} groups, but one step of {self.update.name} needs "
                f"{step}: it would wait for ever; raise Bounds.max_groups"
            )
        return faults

    def _weights_faults(self) -> list[str]:
        rollouts = [s.stage.name for s in self.streams if isinstance(s.stage, RolloutStage)]
        if len(rollouts) > 1:
            return [f"a graph has one rollout stage at most, this one has {len(rollouts)}: {', '.join(rollouts)}"]
        if self.weights is None:
            return [
                f"{name} would sample from its first weights for ever: "
                "give the graph weights=Weights(update, to=rollouts)"
                for name in rollouts
                if not isinstance(self.update, Discard)
            ]
        faults: list[str] = []
        if self.weights.source is not self.output:
            faults.append("Weights: the source must be the graph's output")
        if self.weights.to not in self.streams:
            faults.append(f"Weights: {self.weights.to.stage.name!r} is not a stage of this graph")
        elif not isinstance(self.weights.to.stage, RolloutStage):
            faults.append(
                f"Weights: {self.weights.to.stage.name!r} takes no weights; send them to the rollout stage's own stream"
            )
        return faults

    def _evaluation_faults(self) -> Iterator[str]:
        names = [*self.stages, *(e.name for e in self.evaluations)]
        for evaluation in self.evaluations:
            if names.count(evaluation.name) > 1:
                yield (
                    f"two are called {evaluation.name!r}: give the evaluation another name, as in Evaluation(..., "
                    "name='eval_hard')"
                )
            if self.weights is None:
                yield f"{evaluation.name} has no weights to take: give the graph weights=Weights(update, to=rollouts)"
            for stage in evaluation.stages:
                model = stage.settings().get("model")
                trained = self.rollout.settings().get("model") if self.rollout else None
                if isinstance(stage, RolloutStage) and model != trained:
                    yield (
                        f"{evaluation.name}, {stage.name}: model is {model!r}, but {trained!r} is trained: give both "
                        "the same folder"
                    )

    def _agreement_faults(self) -> list[str]:
        """Settings that several stages must agree on."""
        faults: list[str] = []
        temperatures = {n: s.settings()["temperature"] for n, s in self.stages.items() if "temperature" in s.settings()}
        if len(set(temperatures.values())) > 1:
            faults.append(
                "log-probabilities are taken at one temperature everywhere, got "
                + ", ".join(f"{n}.temperature={t}" for n, t in temperatures.items())
            )
        update = self.update.settings()
        correction: Correction | None = update.get("correction")
        takes_current = update.get("old_logprobs") == "trainer" and not (correction and correction.is_on)
        if self.weights and self.weights.max_staleness and takes_current:
            faults.append(
                f"max_staleness={self.weights.max_staleness} trains on samples of older weights, but "
                f"{self.update.name}.old_logprobs='trainer' takes the current ones for theirs: "
                "use correction=Correction(kind='tis'), old_logprobs='rollout', or max_staleness=0"
            )
        source = next((s.stage for s in self.streams if isinstance(s.stage, Source)), None)
        return faults + length_faults(source, self.rollout)


def _walk(output: Stream[Any]) -> Iterator[Stream[Any]]:
    """Every stream once, each after those that it takes in."""
    seen: set[int] = set()

    def visit(stream: Stream[Any]) -> Iterator[Stream[Any]]:
        if id(stream) in seen:
            return
        seen.add(id(stream))
        for taken in stream.inputs.values():
            yield from visit(taken)
        yield stream

    return visit(output)
