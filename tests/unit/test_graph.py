"""Wiring: what is refused when a stage is called on a stream, what `check` finds, and how a graph is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rollstream.graphs import Bounds, EdgeSpec, Graph, Weights
from rollstream.stages.actor import ActorUpdate
from rollstream.stages.advantage import Advantage
from rollstream.stages.base import MapStage, RolloutStage, Source, UpdateStage, check_wiring
from rollstream.stages.errors import ConfigError, WiringError
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.prompts import Prompts
from rollstream.stages.reward import Reward
from rollstream.stages.rollout import Rollout
from rollstream.stages.schema import Advantaged, Prompted, Rollouts, Scored, Trained, WithRef

# Stages that are wired and checked only; none of them ever runs.


class Numbers(Source[Prompted]):
    def rows(self, skip, start):
        raise NotImplementedError

    def fingerprint(self):
        return ""


class Sampler(RolloutStage[Prompted, Rollouts]):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        temperature: float = 1.0
        max_tokens: int = 8
        fault: str = ""

    groups_in_flight = 2
    submit = finished = load_weights = lambda self, *_: None

    def faults(self):
        return [self.config.fault] if self.config.fault else []


class Score(MapStage[Rollouts, Scored]):
    def process(self, group):
        return {}


class Weigh(MapStage[Scored, Advantaged]):
    def process(self, group):
        return {}


class Tokens(MapStage[Rollouts, Rollouts]):
    def process(self, group):
        return {}


class Ref(MapStage[Rollouts, WithRef]):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        temperature: float = 1.0

    def process(self, group):
        return {}


class Train(UpdateStage[Advantaged, Trained]):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        temperature: float = 1.0
        groups_per_step: int = 4
        old_logprobs: str = "trainer"
        correction: Correction = field(default_factory=Correction)

    data_parallel_size = 1
    groups_per_step = property(lambda self: self.config.groups_per_step)
    share_of = update = weights = save = load = export = lambda self, *_: None

    def __call__(self, stream, *, ref=None):
        check_wiring(self, stream, Advantaged)
        return self._wire(stream=stream, **({"ref": ref} if ref else {}))


def graph(*, sampler: Any = None, ref: Any = None, train: Any = None, staleness: int = 0, **options: Any) -> Graph:
    """numbers -> sampler -> score -> weigh -> train, with the reference at its side where `ref` has its settings."""
    rollouts = Sampler(Sampler.Config(**(sampler or {})))(Numbers())
    side = None if ref is None else Ref(Ref.Config(**ref))(rollouts)
    output = Train(Train.Config(**(train or {})))(Weigh()(Score()(rollouts)), ref=side)
    return Graph("g", output=output, weights=Weights(output, to=rollouts, max_staleness=staleness), **options)


def other(output: Any, **weights: Any) -> Graph:
    return Graph("g", output=output, **weights)


def test_a_sound_graph_has_no_faults():
    assert graph(ref={}).faults() == []


def test_a_stage_on_the_wrong_stream_names_both_schemas():
    with pytest.raises(
        WiringError, match=r"^Score's input must be a stream of Rollouts; Numbers puts out Prompted \("
    ) as e:
        Score()(Numbers())
    assert "which lacks sample_id, response, response_ids" in str(e.value)


def test_a_real_stage_on_the_wrong_stream_names_both_schemas():
    prompts = Prompts(Prompts.Config(path="p.jsonl", model="m"))
    with pytest.raises(WiringError, match=r"Reward's input must be a stream of Rollouts; Prompts puts out Prompted"):
        Reward(Reward.Config(function="exact_match"))(prompts)  # type: ignore[arg-type]


def test_a_stage_on_something_else_than_a_stream():
    with pytest.raises(WiringError, match=r"Score's input must be a stream .*got Score"):
        Score()(Score())


def test_a_kl_penalty_without_a_reference_is_refused():
    rollouts = Rollout(Rollout.Config(model="m", max_tokens=4))(Prompts(Prompts.Config(path="p.jsonl", model="m")))
    advantaged = Advantage()(Reward(Reward.Config(function="exact_match"))(rollouts))
    with pytest.raises(WiringError, match=r"kl_coef=0.1 needs ref=: wire RefLogprob"):
        ActorUpdate(ActorUpdate.Config(model="m", groups_per_step=4, kl_coef=0.1))(advantaged)


def test_an_output_that_is_no_update_stage_is_refused_at_once():
    with pytest.raises(WiringError, match=r"must be the stream of an update stage.*got Score"):
        other(Score()(Sampler()(Numbers())))


def test_stages_of_one_name_are_found():
    rollouts = Sampler()(Numbers())
    output = Train()(Weigh(name="score")(Score()(rollouts)))
    faults = other(output, weights=Weights(output, to=rollouts)).faults()
    assert faults == ["two stages are called 'score': give one another name, as in Reward(config, name='style_reward')"]


def test_a_rollout_without_weights_is_found():
    (fault,) = other(Train()(Weigh()(Score()(Sampler()(Numbers()))))).faults()
    assert "sampler would sample from its first weights for ever: give the graph weights=Weights(" in fault


def test_two_sources_are_found():
    rollouts = Sampler()(Numbers())
    side = Ref()(Sampler(name="sampler_2")(Numbers(name="more")))
    output = Train()(Weigh()(Score()(rollouts)), ref=side)
    assert other(output, weights=Weights(output, to=rollouts)).faults() == [
        "a graph has one source, this one has 2: numbers, more",
        "a graph has one rollout stage at most, this one has 2: sampler, sampler_2",
    ]


def test_weights_of_another_graph_are_found():
    mine, foreign = graph(), graph()
    mine.weights = foreign.weights
    assert mine.faults() == [
        "Weights: the source must be the graph's output",
        "Weights: 'sampler' is not a stage of this graph",
    ]


def test_weights_to_a_stage_that_takes_none_are_found():
    scored = Score()(Sampler()(Numbers()))
    output = Train()(Weigh()(scored))
    (fault,) = other(output, weights=Weights(output, to=scored)).faults()
    assert fault == "Weights: 'score' takes no weights; send them to the rollout stage's own stream"


def test_only_an_update_stage_joins_streams():
    class Both(Weigh):
        def __call__(self, stream, ref):
            return self._wire(stream=stream, ref=ref)

    rollouts = Sampler()(Numbers())
    output = Train()(Both()(Score()(rollouts), Ref()(rollouts)))
    (fault,) = other(output, weights=Weights(output, to=rollouts)).faults()
    assert fault == "both takes 2 streams (stream, ref): only an update stage joins streams"


def test_an_edge_smaller_than_a_step_is_found():
    (fault,) = graph(train={"groups_per_step": 5}, bounds=Bounds(max_groups=4)).faults()
    assert fault.startswith("an edge holds at most 4 groups, but one step of train needs 5")


@pytest.mark.parametrize("bound", ["max_groups", "max_bytes", "lease_s"])
def test_bounds_must_be_above_nothing(bound):
    with pytest.raises(ConfigError, match="must be above 0"):
        Bounds(**{bound: 0})


def test_temperatures_that_differ_are_found():
    (fault,) = graph(sampler={"temperature": 0.7}, ref={}, train={"temperature": 0.7}).faults()
    assert fault.endswith("got sampler.temperature=0.7, ref.temperature=1.0, train.temperature=0.7")


def test_staleness_needs_the_log_probabilities_of_the_rollout():
    (fault,) = graph(staleness=2).faults()
    assert "use correction=Correction(kind='tis'), old_logprobs='rollout', or max_staleness=0" in fault
    assert graph(staleness=2, train={"old_logprobs": "rollout"}).faults() == []


def test_staleness_may_be_corrected_instead():
    assert graph(staleness=2, train={"correction": Correction(kind="mask")}).faults() == []


def test_negative_staleness_is_refused():
    with pytest.raises(ConfigError, match="max_staleness must be 0 or more, got -1"):
        graph(staleness=-1)


def test_a_prompt_too_long_for_the_model_is_found():
    class Long(Numbers):
        def longest_prompt(self):
            return 60

        def max_model_tokens(self):
            return 64

    rollouts = Sampler()(Long())
    output = Train()(Weigh()(Score()(rollouts)))
    (fault,) = other(output, weights=Weights(output, to=rollouts)).faults()
    assert "the longest prompt has 60 tokens and sampler.max_tokens is 8: 68 in all, the model takes 64" in fault


def test_check_lists_all_at_once():
    rollouts = Sampler(Sampler.Config(fault="the folder is empty"))(Numbers())
    output = Train(Train.Config(groups_per_step=9))(Weigh(name="score")(Score()(rollouts)))
    wrong = other(output, bounds=Bounds(max_groups=1))
    with pytest.raises(ConfigError) as caught:
        wrong.check()
    told = str(caught.value)
    assert told.startswith("4 faults:\n  - two stages are called 'score'")
    assert "first weights for ever" in told
    assert "one step of train needs 9" in told
    assert "sampler: the folder is empty" in told


def test_faults_of_both_stages_of_one_name_are_found():
    rollouts = Sampler(Sampler.Config(fault="first"))(Numbers())
    side = Ref()(Sampler(Sampler.Config(fault="second"))(Numbers()))
    faults = other(Train()(Weigh()(Score()(rollouts)), ref=side)).faults()
    assert {"sampler: first", "sampler: second"} <= set(faults)


def test_one_edge_leads_to_all_who_take_from_a_stage():
    edges = {e.producer: e for e in graph(ref={}).edges}
    assert edges["sampler"] == EdgeSpec(producer="sampler", consumers=("score", "ref"))
    assert edges["sampler"].name == "sampler -> score, ref"
    assert set(edges) == {"numbers", "sampler", "score", "weigh", "ref"}


def test_so_many_groups_are_admitted_as_staleness_allows():
    assert graph(staleness=2, train={"old_logprobs": "rollout"}).admitted(version=3) == (2 + 3 + 1) * 4


def test_without_a_weight_edge_an_edgeful_of_groups_is_admitted_beyond_those_trained():
    stream = Train()(Weigh()(Score()(Sampler()(Numbers()))))
    assert Graph("g", output=stream, bounds=Bounds(max_groups=10)).admitted(version=3) == 3 * 4 + 10


def test_a_stage_knows_its_inputs_by_argument():
    assert graph(ref={}).inputs_of("train") == {"stream": "weigh", "ref": "ref"}
    assert graph().inputs_of("numbers") == {}


def test_settings_are_those_of_every_stage_and_the_graph():
    settings = graph(staleness=1, train={"groups_per_step": 2}).settings()
    assert settings["train"] == {
        "temperature": 1.0,
        "groups_per_step": 2,
        "old_logprobs": "trainer",
        "correction": Correction(),
    }
    assert settings["graph"]["max_staleness"] == 1
    assert settings["graph"]["max_groups"] == 256


# Drawings ---------------------------------------------------------------------------------------------------------


def test_a_line_is_drawn_as_a_line():
    assert str(graph()) == (
        "numbers -> sampler -> score -> weigh -> train\n"  #
        "weights: train -> sampler (at most 0 versions behind)"
    )


def test_a_side_stage_is_drawn_from_where_it_leaves_to_where_it_joins():
    assert str(graph(ref={}, staleness=1)) == (
        "numbers -> sampler -> score -> weigh -> train\n"
        "                 \\-> ref --------------/\n"
        "weights: train -> sampler (at most 1 versions behind)"
    )


def test_a_side_chain_of_several_stages_is_drawn_whole():
    rollouts = Sampler()(Numbers())
    side = Ref()(Tokens()(rollouts))
    assert str(other(Train()(Weigh()(Score()(rollouts)), ref=side))) == (
        "numbers -> sampler -> score -> weigh -> train\n"  #
        "                 \\-> tokens -> ref ----/"
    )


def test_a_side_chain_longer_than_its_place_is_drawn_whole():
    rollouts = Sampler(name="s")(Numbers(name="n"))
    side = Ref(name="a_reference_with_a_long_name")(rollouts)
    assert str(other(Train(name="t")(Weigh(name="w")(Score(name="r")(rollouts)), ref=side))) == (
        "n -> s -> r -> w -> t\n"  #
        "     \\-> a_reference_with_a_long_name -/"
    )


def test_an_edge_past_stages_of_the_main_chain_is_drawn():
    rollouts = Sampler(name="s")(Numbers(name="n"))
    assert str(other(Train(name="t")(Weigh(name="w")(Score(name="r")(rollouts)), ref=rollouts))) == (
        "n -> s -> r -> w -> t\n"  #
        "     \\-------------/"
    )
