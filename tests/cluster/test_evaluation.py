"""Evaluation beside training, on a real cluster with toy stages: a sample's one token is the version that made it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlflow import MlflowClient
from toys import Echo, HeldOut, Versions, diary_of, toy_graph

from rollstream import Evaluation, run
from rollstream.graphs.checkpoint import Checkpoints
from rollstream.stages.errors import StageError

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def held_out(*, sleep_s=0.0, every=2, **versions) -> Evaluation:
    answers = Echo(Echo.Config(sleep_s=sleep_s), name="answers")(HeldOut(HeldOut.Config(count=5)))
    return Evaluation(Versions(Versions.Config(**versions))(answers), every=every)


def found_in(steps) -> dict[int, tuple[float, float]]:
    """Of each step that was evaluated: least and most of the versions that answered."""
    metrics = {e.step: e.metrics for step in steps for e in step.evaluations}
    return {step: (m["eval/reward/least"], m["eval/reward/most"]) for step, m in metrics.items()}


def test_each_evaluation_is_of_one_version_and_is_recorded_at_its_step(tmp_path):
    graph = toy_graph(tmp_path / "d", max_staleness=1, sleep_s=0.5, evaluations=[held_out(sleep_s=0.15)])
    found = found_in(run(graph, steps=5, out=tmp_path / "out"))
    assert {0, 4} <= set(found) <= {0, 2, 4}  # 2 is left out where 0 takes so long
    assert all(versions == (step, step) for step, versions in found.items())
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    history = client.get_metric_history(record.info.run_id, "eval/reward/best")
    assert {m.step: m.value for m in history} == {step: step for step in found}
    assert record.data.params["eval.every"] == "2"


def test_training_does_not_wait_for_an_evaluation(tmp_path):
    go_on = tmp_path / "go on"
    graph = toy_graph(tmp_path / "d", evaluations=[held_out(every=100, waits_for=str(go_on))])
    steps = []
    for step in run(graph, steps=4, out=tmp_path / "out"):
        steps.append(step)
        if step.index == 3:
            go_on.touch()
    assert [len(s.evaluations) for s in steps] == [0, 0, 0, 1]  # the last step waits for it
    assert [row["order"] for row in diary_of(tmp_path / "d")] == list(range(16))


def test_an_evaluator_that_dies_answers_all_the_same(tmp_path):
    graph = toy_graph(tmp_path / "d", evaluations=[held_out(die_once=str(tmp_path / "died"))])
    steps = list(run(graph, steps=2, out=tmp_path / "out"))
    assert (tmp_path / "died").exists()
    assert found_in(steps)[2] == (2, 2)
    assert {0, 2} == set(found_in(steps))


def test_an_evaluation_that_raises_ends_the_run_with_its_own_error(tmp_path):
    graph = toy_graph(tmp_path / "d", sleep_s=0.5, evaluations=[held_out(fails=True, waits_for=str(tmp_path / "go"))])
    steps = run(graph, steps=50, out=tmp_path / "out")
    done = [next(steps).index, next(steps).index]
    (tmp_path / "go").touch()
    with pytest.raises(StageError, match="the toy divides by zero") as caught:
        done.extend(step.index for step in steps)
    assert (caught.value.stage, caught.value.subject) == ("eval.versions", "g0")
    found = Checkpoints(tmp_path / "out/checkpoints").latest()
    assert found is not None
    assert done == list(range(1, found.state.step + 1))  # no step that was done is lost, nor kept from the user


def test_an_evaluation_that_raises_at_the_end_costs_neither_the_last_step_nor_the_export(tmp_path):
    graph = toy_graph(tmp_path / "d", evaluations=[replace(held_out(fails=True), at_start=False)])
    steps = run(graph, steps=2, out=tmp_path / "out")
    assert [next(steps).index, next(steps).index] == [1, 2]
    with pytest.raises(StageError, match="the toy divides by zero"):
        next(steps)
    assert (tmp_path / "out/model").exists()
