"""Graphs that are cut or fed from recordings: which stages stay, what is refused, and that the given graph stays."""

from __future__ import annotations

import pytest

from rollstream.graphs import Bounds, Graph, Weights
from rollstream.graphs.options import RunOptions
from rollstream.graphs.surgery import cut, narrowed, prepared, replayed
from rollstream.placement import Bundle, Placement
from rollstream.stages.base import MapStage, RolloutStage, Source, UpdateStage
from rollstream.stages.errors import ConfigError, PlacementError
from rollstream.stages.schema import Advantaged, Prompted, Rollouts, Scored, Trained, WithRef


class Numbers(Source[Prompted]):
    rows = fingerprint = lambda self, *_: None


class Sampler(RolloutStage[Prompted, Rollouts]):
    groups_in_flight = 1
    submit = finished = load_weights = lambda self, *_: None


class Score(MapStage[Rollouts, Scored]):
    process = lambda self, _: {}  # noqa: E731


class Weigh(MapStage[Scored, Advantaged]):
    process = lambda self, _: {}  # noqa: E731


class Ref(MapStage[Rollouts, WithRef]):
    process = lambda self, _: {}  # noqa: E731


class Train(UpdateStage[Advantaged, Trained]):
    groups_per_step, data_parallel_size = 3, 1
    share_of = update = weights = save = load = export = lambda self, *_: None

    def __call__(self, stream, ref):
        return self._wire(stream=stream, ref=ref)


@pytest.fixture
def graph() -> Graph:
    """numbers -> sampler -> score -> weigh -> train, with sampler -> ref -> train beside it."""
    rollouts = Sampler()(Numbers())
    output = Train()(Weigh()(Score()(rollouts)), Ref()(rollouts))
    return Graph("g", output=output, weights=Weights(output, to=rollouts, max_staleness=2), bounds=Bounds(max_groups=9))


def wires(graph: Graph) -> list[str]:
    return [edge.name for edge in graph.edges]


def faults_of(graph: Graph, *files: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        replayed(graph, files)
    return caught.value.faults


# cut ---------------------------------------------------------------------------------------------------------------


def test_a_cut_graph_ends_behind_its_last_stage(graph):
    made = cut(graph, "score")
    assert wires(made) == ["numbers -> sampler", "sampler -> score", "score -> discard"]
    assert (made.name, made.weights, made.update.groups_per_step) == ("g-until-score", None, 3)
    assert made.bounds is graph.bounds
    assert made.faults() == []


def test_a_cut_graph_shares_its_stages_with_the_whole(graph):
    before = str(graph)
    assert cut(graph, "sampler").stages["sampler"] is graph.stages["sampler"]
    assert str(graph) == before


@pytest.mark.parametrize(("until", "hint"), [("samplr", "did you mean 'sampler'?"), ("train", "Known: numbers, ref")])
def test_a_cut_behind_no_stage_or_the_update_is_refused(graph, until, hint):
    with pytest.raises(ConfigError, match=f"until must name a stage before train, got '{until}': .*") as caught:
        cut(graph, until)
    assert hint in str(caught.value)


# replayed ----------------------------------------------------------------------------------------------------------


def test_a_replayed_rollout_takes_the_place_of_all_before_it(graph, recorded):
    made = replayed(graph, [recorded("sampler", Rollouts)])
    assert wires(made) == ["sampler -> score, ref", "score -> weigh", "weigh -> train", "ref -> train"]
    assert isinstance(made.stages["sampler"], Source)
    assert (made.name, made.weights, made.bounds) == ("g-replay", None, graph.bounds)
    assert made.faults() == []


def test_the_given_graph_stays(graph, recorded):
    before, streams = str(graph), graph.streams
    replayed(graph, [recorded("sampler", Rollouts)])
    assert (str(graph), graph.streams) == (before, streams)


def test_weights_go_on_to_a_rollout_that_runs(graph, recorded):
    made = replayed(graph, [recorded("numbers", Prompted)])
    assert made.weights is not None
    assert made.weights.max_staleness == 2
    assert made.faults() == []


def test_a_recording_that_leaves_two_sources_is_refused_with_the_way_out(graph, recorded):
    assert faults_of(graph, recorded("weigh", Advantaged)) == [
        "weigh is replayed, but train also takes from numbers -> sampler -> ref, which would run, and a graph has one "
        "source: replay ref too, or sampler alone"
    ]


def test_recordings_of_both_sides_become_one_source(graph, recorded):
    made = replayed(graph, [recorded("ref", WithRef), recorded("weigh", Advantaged)])
    assert wires(made) == ["weigh+ref -> train"]
    assert made.inputs_of("train") == {"stream": "weigh+ref"}
    assert made.faults() == []


def test_one_source_of_two_recordings_may_feed_a_stage_and_the_update(graph, recorded):
    made = replayed(graph, [recorded("ref", WithRef), recorded("score", Scored)])
    assert wires(made) == ["score+ref -> weigh, train", "weigh -> train"]


def test_what_is_wrong_with_any_recording_comes_at_once(graph, recorded, tmp_path):
    twin = recorded("sampler", Rollouts, run="b")
    file = recorded("sampler", Rollouts)
    faults = faults_of(graph, file, recorded("samplr", Rollouts), str(tmp_path / "none"), twin)
    assert "was recorded behind 'samplr', which is no stage here: did you mean 'sampler'?" in faults[0]
    assert "there is no such file" in faults[1]
    assert faults[2] == f"{file} and {twin} were both recorded behind 'sampler': leave one out"
    assert len(faults) == 3


def test_a_recording_that_no_stage_needs_is_refused(graph, recorded):
    files = recorded("sampler", Rollouts), recorded("numbers", Prompted)
    assert faults_of(graph, *files) == [
        f"{files[1]} is not needed: sampler, behind numbers, will not run: leave it out"
    ]


def test_wrong_columns_are_found_by_the_graphs_check(graph, recorded):
    made = replayed(graph, [recorded("sampler", Rollouts, without="response")])
    with pytest.raises(ConfigError, match=r"sampler: .* has no column 'response'"):
        made.check()


# prepared ----------------------------------------------------------------------------------------------------------


def test_a_run_without_such_options_gets_what_it_gave(graph):
    given = graph, Placement.auto(), RunOptions(steps=1, record=("sampler",))
    assert prepared(*given) == given


def test_a_replayed_run_that_is_cut_has_both(graph, recorded):
    """Cut first: what the recordings must bring is less then."""
    options = RunOptions(steps=1, until="weigh", replay=(recorded("score", Scored),), record=("weigh",))
    made, _, options = prepared(graph, Placement.auto(), options)
    assert wires(made) == ["score -> weigh", "weigh -> discard"]
    assert made.name == "g-until-weigh-replay"
    assert not options.export


@pytest.mark.parametrize(("stage", "hint"), [("samplr", "did you mean 'sampler'?"), ("train", "Known"), ("ref", "")])
def test_a_stage_that_cannot_be_recorded_is_refused(graph, stage, hint):
    options = RunOptions(steps=1, until="sampler", record=(stage,))
    with pytest.raises(ConfigError, match=f"no stage '{stage}' to record in g-until-sampler: .*Known: ") as caught:
        prepared(graph, Placement.auto(), options)
    assert hint in str(caught.value)


def test_a_replayed_stage_is_not_recorded_again(graph, recorded):
    options = RunOptions(steps=1, replay=(recorded("sampler", Rollouts),), record=("sampler",))
    with pytest.raises(ConfigError, match=r"no stage 'sampler' to record in g-replay: .*Known: ref, score, weigh"):
        prepared(graph, Placement.auto(), options)


@pytest.fixture
def begun(tmp_path):
    """A recording in the folder of a run."""
    file = tmp_path / "recorded/sampler.arrows"
    file.parent.mkdir()
    file.touch()
    return file


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_recording_of_another_run_is_not_written_on(graph, begun, tmp_path, resume):
    options = RunOptions(steps=1, out=tmp_path, record=("sampler",), resume=resume)
    with pytest.raises(ConfigError, match=f"{begun} was recorded before: move it away"):
        prepared(graph, Placement.auto(), options)


def test_a_resumed_run_goes_on_with_its_recording(graph, begun, tmp_path):
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    options = RunOptions(steps=1, out=tmp_path, record=("sampler",), resume="auto")
    assert prepared(graph, Placement.auto(), options)[2] is options


# narrowed ----------------------------------------------------------------------------------------------------------


def test_a_placement_loses_the_stages_and_bundles_of_what_is_gone(graph, recorded):
    bundles = [Bundle(1), Bundle(2, 1), Bundle(4, 1)]
    placement = Placement.fixed(bundles, {"sampler": [1, 1], "train": 2}, replicas={"sampler": 2, "score": 2})
    made = narrowed(placement, graph, replayed(graph, [recorded("sampler", Rollouts)]))
    assert made.bundles == (Bundle(1), Bundle(4, 1))
    assert made.stages == {"score": 0, "weigh": 0, "ref": 0, "train": 1}
    assert made.replicas == {"score": 2}


def test_a_bundle_for_each_stage_stays_so(graph):
    assert narrowed(Placement.spread(), graph, cut(graph, "sampler")).bundles is None


def test_where_no_stage_is_left_the_source_has_the_first_bundle(graph, recorded):
    made = cut(replayed(graph, [recorded("sampler", Rollouts)]), "sampler")
    assert narrowed(Placement.fixed([Bundle(3), Bundle(1)], {"train": 1}), graph, made).bundles == (Bundle(3),)


def test_a_stage_that_the_placement_names_wrongly_is_still_found(graph):
    with pytest.raises(PlacementError, match="did you mean 'sampler'"):
        narrowed(Placement.fixed([Bundle()], {"samplr": 0}), graph, cut(graph, "sampler"))
