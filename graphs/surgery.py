"""Graphs made of others: one that ends early, and one that takes recordings in the place of stages.

    prompts -> rollout -> reward -> advantage -> actor_update
                      \\-> ref_logprob ----------/

    cut at rollout           prompts -> rollout -> discard
    rollout replayed         rollout -> reward -> advantage -> actor_update,  rollout -> ref_logprob -> actor_update
    advantage replayed       refused: ref_logprob still needs prompts and rollout, and a graph has one source
    both replayed            advantage+ref_logprob -> actor_update

The graph that is given stays as it is. Weights go where the rollout stage still runs and something is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.graphs.crew import demands
from rollstream.graphs.discard import Discard
from rollstream.graphs.graph import Graph
from rollstream.graphs.options import RunOptions
from rollstream.graphs.recording import about_of
from rollstream.graphs.replay import ReplaySource
from rollstream.graphs.weights import Weights
from rollstream.placement import Placement
from rollstream.stages.base import Stream
from rollstream.stages.errors import ConfigError, DataError
from rollstream.stages.names import known_names
from rollstream.stages.schema import Trained


def prepared(graph: Graph, placement: Placement, options: RunOptions) -> tuple[Graph, Placement, RunOptions]:
    """What a run with these options runs. Raises ConfigError where `until`, `replay` or `record` do not fit it."""
    changed = graph
    if options.until is not None:
        changed, options = cut(graph, options.until), dataclasses.replace(options, export=False)
    if options.replay:
        changed = replayed(changed, options.replay)
    if faults := list(_record_faults(graph, changed, options)):
        raise ConfigError(faults)
    return changed, narrowed(placement, graph, changed), options


def cut(graph: Graph, until: str) -> Graph:
    """The graph up to the stage `until`, as GRAPH-until-STAGE; nothing is trained. A step takes as many groups as the
    update stage would."""
    last = next((s for s in graph.streams if s.stage.name == until), None)
    if last is None or last is graph.output:
        known = known_names(until, (e.producer for e in graph.edges))
        raise ConfigError(f"until must name a stage before {graph.update.name}, got {until!r}: {known}")
    discard = Discard(Discard.Config(groups_per_step=graph.update.groups_per_step))
    output = Stream(discard, Trained, {"stream": last})
    return Graph(f"{graph.name}-until-{until}", output=output, bounds=graph.bounds)


def replayed(graph: Graph, recordings: Sequence[str | Path]) -> Graph:
    """The graph with recordings in the place of the stages that made them, as GRAPH-replay. Stages that only these
    need are dropped; several recordings become one source."""
    files = _by_stage(graph, recordings)
    live, replaced = _parts(graph.output, files)
    if faults := [*_unneeded(graph, files, replaced), *_source_faults(graph, replaced)]:
        raise ConfigError(faults)
    source = ReplaySource(
        ReplaySource.Config(path=tuple(files[s.stage.name] for s in replaced)),
        name="+".join(s.stage.name for s in replaced),
        schemas=[s.schema for s in replaced],
    )
    made: dict[int, Stream[Any]] = {id(stream): source for stream in replaced}
    for stream in live:
        made[id(stream)] = Stream(stream.stage, stream.schema, _inputs(stream, made))
    output, weights = made[id(graph.output)], None
    if graph.weights is not None and graph.weights.to in live:
        weights = Weights(output, to=made[id(graph.weights.to)], max_staleness=graph.weights.max_staleness)
    evaluations = graph.evaluations if weights else ()
    return Graph(f"{graph.name}-replay", output=output, weights=weights, bounds=graph.bounds, evaluations=evaluations)


def narrowed(placement: Placement, before: Graph, after: Graph) -> Placement:
    """The placement without the stages that were dropped or replaced, and without the bundles that only these had."""
    if before is after:
        return placement
    placement.plan(demands(before, placement))  # a stage that it names wrongly is found in the whole graph
    stay = {name for name, stage in after.stages.items() if before.stages.get(name) is stage}
    stay |= {evaluation.name for evaluation in after.evaluations}
    seats = {name: place for name, place in placement.stages.items() if name in stay}
    replicas = {name: number for name, number in placement.replicas.items() if name in stay}
    bundles = placement.bundles
    if bundles is not None:
        places = {name: seats.get(name, 0) for name in stay}
        used = sorted({b for place in places.values() for b in ([place] if isinstance(place, int) else place)}) or [0]
        new = {old: number for number, old in enumerate(used)}
        bundles = tuple(bundles[b] for b in used)
        seats = {n: new[p] if isinstance(p, int) else [new[b] for b in p] for n, p in places.items()}
    return dataclasses.replace(placement, bundles=bundles, stages=seats, replicas=replicas)


def _record_faults(graph: Graph, changed: Graph, options: RunOptions) -> Iterator[str]:
    """Stages that do not run, and files that other runs began: what this run does not come to would stay theirs."""
    known = [e.producer for e in changed.edges if changed.stages[e.producer] is graph.stages.get(e.producer)]
    folder = options.folder(changed.name)
    goes_on = any((folder / "checkpoints").glob("step_*"))
    for name in options.record:
        path = folder / "recorded" / f"{name}.arrows"
        if name not in known:
            yield f"there is no stage {name!r} to record in {changed.name}: {known_names(name, known)}"
        elif path.exists() and not goes_on:
            yield f"{path} was recorded before: move it away, give another folder (out=...), or resume that run"


def _by_stage(graph: Graph, recordings: Sequence[str | Path]) -> dict[str, str]:
    """The recordings by the stage that made each. Which graph it was of does not matter: the columns do."""
    known = [e.producer for e in graph.edges]
    files: dict[str, str] = {}
    faults: list[str] = []
    for given in recordings:
        path = Path(given).expanduser().absolute()
        try:
            stage = about_of(path).get("edge", "")
        except DataError as error:
            faults += error.faults
            continue
        if stage not in known:
            faults.append(f"{path} was recorded behind {stage!r}, which is no stage here: {known_names(stage, known)}")
        elif stage in files:
            faults.append(f"{files[stage]} and {path} were both recorded behind {stage!r}: leave one out")
        files.setdefault(stage, str(path))
    if faults:
        raise ConfigError(faults)
    return files


def _parts(output: Stream[Any], files: Mapping[str, str]) -> tuple[list[Stream[Any]], list[Stream[Any]]]:
    """The streams that run, each after those that it takes in, and those whose recordings they take."""
    live: list[Stream[Any]] = []
    replaced: list[Stream[Any]] = []

    def visit(stream: Stream[Any]) -> None:
        if stream in live or stream in replaced:
            return
        if stream.stage.name in files:
            replaced.append(stream)
            return
        for taken in stream.inputs.values():
            visit(taken)
        live.append(stream)

    visit(output)
    return live, replaced


def _inputs(stream: Stream[Any], made: Mapping[int, Stream[Any]]) -> dict[str, Stream[Any]]:
    """What it takes in the new graph; a source that stands for several inputs is taken once."""
    inputs: dict[str, Stream[Any]] = {}
    for argument, taken in stream.inputs.items():
        if made[id(taken)] not in inputs.values():
            inputs[argument] = made[id(taken)]
    return inputs


def _unneeded(graph: Graph, files: Mapping[str, str], replaced: Sequence[Stream[Any]]) -> Iterator[str]:
    names = [s.stage.name for s in replaced]
    for stage, path in files.items():
        if stage not in names:
            taking = next(e.consumers for e in graph.edges if e.producer == stage)
            yield f"{path} is not needed: {', '.join(taking)}, behind {stage}, will not run: leave it out"


def _source_faults(graph: Graph, replaced: Sequence[Stream[Any]]) -> Iterator[str]:
    """Ways to the update stage on which groups would still come from a source that runs."""
    above = {s.stage.name for stream in replaced for s in _way(stream)}
    for taken in graph.output.inputs.values():
        way = _way(taken)
        if any(stream in replaced for stream in way):
            continue
        names = [stream.stage.name for stream in way]
        also = " or ".join(name for name in reversed(names) if name not in above)
        common = next((name for name in reversed(names) if name in above), names[-1])
        yield (
            f"{', '.join(s.stage.name for s in replaced)} is replayed, but {graph.update.name} also takes from "
            f"{' -> '.join(names)}, which would run, and a graph has one source: replay "
            + (f"{also} too, or " if also else "")
            + f"{common} alone"
        )


def _way(stream: Stream[Any]) -> list[Stream[Any]]:
    """All streams from the source to this one."""
    before = next(iter(stream.inputs.values()), None)
    return [stream] if before is None else [*_way(before), stream]
