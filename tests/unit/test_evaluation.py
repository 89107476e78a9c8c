"""What an evaluation may be, when it is due, and what the runner does with its answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.graphs import Evaluation, Graph, Weights
from rollstream.graphs import evaluations as evaluating
from rollstream.graphs.evaluations import Evaluations
from rollstream.graphs.weights import Published
from rollstream.stages.base import MapStage, RolloutStage, Source, UpdateStage
from rollstream.stages.errors import (
    ConfigError,
    EngineDied,
    ProcessDied,
    StageError,
    StalledError,
    WiringError,
)
from rollstream.stages.schema import Prompted, Rollouts, Scored, Trained

# Stages that are wired and checked only.


class Numbers(Source[Prompted]):
    rows = fingerprint = lambda self, *_: None


class Sampler(RolloutStage[Prompted, Rollouts]):
    groups_in_flight = 2
    submit = finished = load_weights = lambda self, *_: None


class Score(MapStage[Rollouts, Scored]):
    process = lambda self, group: {}  # noqa: E731


class Train(UpdateStage[Scored, Trained]):
    groups_per_step = data_parallel_size = 1
    share_of = update = weights = save = load = export = lambda self, *_: None


class Few(Numbers):
    def __len__(self) -> int:
        return 3


class TwoRanks(MapStage[Rollouts, Scored]):
    num_ranks = 2

    def process(self, group):
        return {}


def graph(*evaluations: Evaluation, weighed: bool = True) -> Graph:
    rollouts = Sampler()(Numbers())
    output = Train()._wire(stream=Score()(rollouts))
    return Graph("g", output=output, weights=Weights(output, to=rollouts) if weighed else None, evaluations=evaluations)


def chain(source: Any = None, score: Any = None) -> Any:
    return (score or Score())(Sampler()(source or Few()))


def test_a_chain_of_source_rollouts_and_maps_has_no_faults():
    assert Evaluation(chain()).faults() == []


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        (Few(), "an evaluation is a source, a rollout stage, then map stages such as Reward; this one is few"),
        (chain(source=Numbers()), r"numbers does not know how many it has \(__len__\)"),
        (chain(score=TwoRanks()), "two_ranks has 2 ranks, but an evaluation runs in one process"),
    ],
)
def test_other_chains_are_refused(output, fault):
    with pytest.raises(ConfigError, match=fault):
        graph(Evaluation(output)).check()


def test_there_must_be_weights_to_evaluate():
    assert any("eval has no weights to take" in fault for fault in graph(Evaluation(chain()), weighed=False).faults())


@pytest.mark.parametrize("name", ["graph", "run"])
def test_names_that_the_record_uses_are_refused(name):
    with pytest.raises(ConfigError, match=f"name must not be '{name}'"):
        Evaluation(chain(), name=name)


def test_settings_are_checked_at_once():
    with pytest.raises(ConfigError, match=r"(?s)every must be at least 1, got 0.*name must be .* got 'held out'"):
        Evaluation(chain(), every=0, name="held out")
    with pytest.raises(WiringError, match=r"output must be a stream .* got Score"):
        Evaluation(Score())  # pyright: ignore[reportArgumentType]


def test_two_evaluations_need_two_names():
    with pytest.raises(ConfigError, match="two are called 'eval'"):
        graph(Evaluation(chain()), Evaluation(chain())).check()


def test_evaluations_are_drawn_below_what_is_trained_and_are_no_part_of_it():
    both = graph(Evaluation(chain(), every=5))
    assert str(both) == both.drawing + "\neval: few -> sampler -> score (every 5 steps)"
    assert "eval" not in both.settings()


@pytest.mark.parametrize(("at_start", "due"), [(True, [0, 3, 6]), (False, [3, 6])])
def test_when_it_is_due(at_start, due):
    assert [s for s in range(8) if Evaluation(chain(), every=3, at_start=at_start).is_due(s)] == due


# The runner's side: an answer is a list of what a call gives; calls are numbers in the order made.


class Process:
    """An evaluator. What `answers` does not hold yet is under way."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[int, Any] = {}
        self.evaluate = SimpleNamespace(remote=lambda weights: self._ask("evaluate", weights.version))
        self.hello = SimpleNamespace(remote=lambda: self._ask("hello", None))

    def _ask(self, name: str, argument: Any) -> int:
        self.asked.append((name, argument))
        return len(self.asked)


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any):
        self.process, self.done, self.told, self.now, self.restarted = Process(), [], [], 0.0, 0
        self.stored: Any = None
        monkeypatch.setattr(evaluating.ray, "wait", self._wait)
        monkeypatch.setattr(evaluating, "get", self._get)
        monkeypatch.setattr(evaluating.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(evaluating.actors, "restart", self._restart)
        store = SimpleNamespace(latest=SimpleNamespace(remote=lambda than, timeout_s: self.stored))
        self.evaluations = Evaluations(
            [Evaluation(chain(), every=2, **settings)],
            {"eval": self.process},
            store,
            max_restarts=1,
            done=self.done.append,
            tell=self.told.append,
        )

    def begin(self, step: int) -> None:
        self.stored = Published(version=step + 10, buckets=())
        self.evaluations.begin(step, step + 10)
        self.evaluations.look()

    def answer(self, answer: Any) -> None:
        self.process.answers[len(self.process.asked)] = answer
        self.evaluations.look()

    def _wait(self, calls: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return [c for c in calls if c in self.process.answers], []

    def _get(self, call: Any, what: str, timeout_s: float) -> Any:
        answer = self.process.answers[call] if isinstance(call, int) else call
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _restart(self, actor: Any) -> None:
        self.restarted += 1


DIED = ProcessDied("eval", "", "its process died")


def test_what_is_due_is_asked_with_its_own_weights_and_recorded_at_its_own_step(monkeypatch):
    scene = Scene(monkeypatch)
    for step in (0, 1):
        scene.begin(step)
    assert scene.process.asked == [("evaluate", 10)]
    scene.now = 7.0
    scene.answer({"reward/mean": 0.5})
    (found,) = scene.done
    assert (found.step, found.version, found.metrics, found.seconds) == (0, 10, {"eval/reward/mean": 0.5}, 7.0)
    assert not scene.evaluations.wait(0)


def test_one_waits_for_the_one_before_and_is_left_out_where_the_next_is_due(monkeypatch):
    scene = Scene(monkeypatch)
    for step in (0, 2, 4):
        scene.begin(step)
    assert scene.process.asked == [("evaluate", 10)]
    assert scene.told == [
        "eval of step 2 is left out: an evaluation takes longer than 2 steps; raise `every`, or give it fewer prompts"
    ]
    scene.answer({})
    assert scene.process.asked[1:] == [("evaluate", 14)]
    assert scene.evaluations.wait(0)


@pytest.mark.parametrize(("error", "restarts"), [(DIED, 0), (EngineDied("the core is gone"), 1)])
def test_one_whose_process_died_is_asked_again_once_it_is_back(monkeypatch, error, restarts):
    scene = Scene(monkeypatch)
    scene.begin(0)
    for answer in (error, DIED, None, {"reward/mean": 1.0}):  # it dies, is not back, is back, answers
        scene.answer(answer)
    assert [name for name, _ in scene.process.asked] == ["evaluate", "hello", "hello", "evaluate"]
    assert [found.step for found in scene.done] == [0]
    assert scene.restarted == restarts


def test_one_that_dies_too_often_ends_the_run(monkeypatch):
    scene = Scene(monkeypatch)
    scene.begin(0)
    for answer in (DIED, None):
        scene.answer(answer)
    with pytest.raises(StageError, match=r"its process died 2 times \(max_restarts=1\)"):
        scene.answer(DIED)


@pytest.mark.parametrize("is_back", [True, False])
def test_one_that_takes_too_long_ends_the_run(monkeypatch, is_back):
    scene = Scene(monkeypatch, timeout_s=5.0)
    scene.begin(0)
    if not is_back:
        scene.answer(DIED)
    scene.now = 6.0
    gone = "" if is_back else ": its process died, and is not back"
    with pytest.raises(StalledError, match=rf"eval of step 0 has taken 6 s \(timeout_s=5\){gone}$"):
        scene.evaluations.look()


def test_one_that_raises_ends_the_run_whenever_that_is_looked_at_and_is_not_begun_again(monkeypatch):
    scene = Scene(monkeypatch)
    scene.begin(0)
    with pytest.raises(StageError, match="divides by zero"):
        scene.answer(StageError("eval.score", "g1", "divides by zero"))
    with pytest.raises(StageError, match="divides by zero"):
        scene.evaluations.look()
    assert len(scene.process.asked) == 1


def test_those_that_are_given_up_are_told_of(monkeypatch):
    scene = Scene(monkeypatch)
    scene.begin(0)
    scene.begin(2)
    scene.evaluations.end()
    why = "the run went on without it before it was done"
    assert scene.told == [f"eval of step {step} is left out: {why}" for step in (0, 2)]


@pytest.mark.parametrize("stored", [None, DIED, Published(version=11, buckets=())])
def test_one_whose_weights_the_store_has_not_is_left_out(monkeypatch, stored):
    scene = Scene(monkeypatch)
    scene.stored = stored
    scene.evaluations.begin(0, 10)
    assert scene.process.asked == []
    assert scene.told == ["eval of step 0 is left out: the weight store lost the weights of this step"]


def test_one_whose_weights_died_on_their_way_is_left_out(monkeypatch):
    scene = Scene(monkeypatch)
    scene.begin(0)
    scene.answer(None)
    assert scene.told == ["eval of step 0 is left out: its weights died with the update stage"]
    assert (scene.done, scene.evaluations.wait(0)) == ([], False)
