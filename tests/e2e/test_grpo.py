"""The real graph on a tiny model: numbers that must hold, what is kept, and that it learns."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rollstream import GRPO, ActorUpdate, Evaluation, Placement, Prompts, RefLogprob, Reward, Rollout, Step, grpo, run
from rollstream.stages.base import World
from rollstream.stages.megatron.layout import Layout

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_cluster")]


@dataclass(frozen=True)
class Done:
    """A run that came to its end."""

    steps: list[Step]
    folder: Path


@pytest.fixture(scope="module")
def config(tiny_chat_model, sums) -> GRPO:
    """Rewards the share of response tokens that are lower-case letters."""
    model = str(tiny_chat_model)
    return GRPO(
        data=Prompts.Config(path=str(sums), model=model, prompt="question"),
        rollout=Rollout.Config(model=model, n=8, max_tokens=8, temperature=0.7),
        reward=Reward.Config(function=share_of_letters),
        actor=ActorUpdate.Config(model=model, groups_per_step=4, lr=3e-3, kl_coef=0.001, temperature=0.7),
        ref=RefLogprob.Config(model=model, temperature=0.7),
    )


def share_of_letters(response: str, response_ids: list[int]) -> float:
    return sum("a" <= c <= "z" for c in response) / len(response_ids)


def greedy(model: str) -> Rollout.Config:
    return Rollout.Config(model=model, n=1, temperature=0, max_tokens=8)


ONE_THREAD = Placement.auto(threads=1)
NUM_STEPS = 14


@pytest.fixture(scope="module")
def done(config, tmp_path_factory) -> Done:
    """The run that several tests look at; they change nothing in its folder."""
    folder = tmp_path_factory.mktemp("done") / "runs/a"
    held_out = Rollout(greedy(config.rollout.model))(Prompts(config.data))
    config = replace(config, evaluations=[Evaluation(Reward(config.reward)(held_out), every=NUM_STEPS // 2)])
    return Done(list(run(grpo(config), steps=NUM_STEPS, out=folder, placement=ONE_THREAD)), folder)


def test_step_one_is_exactly_on_policy_and_the_reward_rises(done):
    first = done.steps[0].metrics
    assert first["actor/ratio"] == 1.0
    assert first["actor/kl"] == 0.0
    assert first["ref/kl"] <= 1e-6
    assert first["rollout/logprob_diff"] <= 1e-5
    rewards = [s.metrics["reward/mean"] for s in done.steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    # new weights reach the engine each step
    assert max(s.metrics["rollout/logprob_diff"] for s in done.steps) <= 1e-4


def test_evaluations_are_of_the_weights_of_their_step(done, config):
    """The last one is that of the model which the run leaves, answered here."""
    rewards = {e.step: e.metrics["eval/reward/mean"] for step in done.steps for e in step.evaluations}
    assert {0, NUM_STEPS} <= set(rewards) <= {0, NUM_STEPS // 2, NUM_STEPS}
    assert rewards[NUM_STEPS] > rewards[0] + 0.2
    answers, source = Rollout(greedy(str(done.folder / "model"))), Prompts(config.data)
    answers.setup(World(threads=1))
    groups = answers.run(itertools.islice(source.rows(frozenset(), 0), len(source)))
    rows = [row for group in groups for row in group.to_pylist()]
    own = [share_of_letters(row["response"], row["response_ids"]) for row in rows]
    assert rewards[NUM_STEPS] == pytest.approx(np.mean(own))


def test_what_a_run_keeps(done, config):
    """The MLflow record, and a model that transformers loads and that is the trained one."""
    from mlflow import MlflowClient
    from transformers import AutoModelForCausalLM

    client = MlflowClient(f"sqlite:///{done.folder.parent}/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    assert record.info.status == "FINISHED"
    assert record.data.params["rollout.temperature"] == "0.7"
    steps = [m.step for m in client.get_metric_history(record.info.run_id, "reward/mean")]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert record.data.metrics["actor/loss"] == pytest.approx(done.steps[-1].metrics["actor/loss"])
    kept = {a.path for a in client.list_artifacts(record.info.run_id)}
    assert {"graph.txt", "settings.json", "samples"} <= kept
    model = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    start = AutoModelForCausalLM.from_pretrained(config.actor.model)
    changed = (model.model.embed_tokens.weight - start.model.embed_tokens.weight).abs().max().item()
    assert changed > 1e-3


def test_two_tensor_parallel_ranks_give_the_same_numbers(done, config, tmp_path):
    layout = Layout(tp=2)
    two = replace(config, actor=replace(config.actor, layout=layout), ref=replace(config.ref, layout=layout))
    pair = list(run(grpo(two), steps=2, out=tmp_path / "runs/2", placement=ONE_THREAD))
    for name in ("reward/mean", "actor/entropy", "actor/grad_norm", "rollout/response_tokens"):
        assert pair[0].metrics[name] == pytest.approx(done.steps[0].metrics[name], rel=1e-4), name
    assert pair[0].metrics["ref/kl"] <= 1e-6


def test_overlapped_generation_trains_on_the_rollouts_own_logprobs(config, tmp_path):
    late = replace(config, max_staleness=1, actor=replace(config.actor, old_logprobs="rollout"))
    steps = list(run(grpo(late), steps=4, out=tmp_path / "runs/a", placement=ONE_THREAD))
    assert max(s.metrics["rollout/staleness"] for s in steps) == 1.0
    assert steps[-1].metrics["actor/ratio"] != 1.0


def test_a_run_goes_on_in_another_layout(done, config, tmp_path, capfd):
    shutil.copytree(done.folder.parent, tmp_path / "runs")  # its MLflow record too
    cut = replace(config, actor=replace(config.actor, layout=Layout(tp=2)))
    options = {"out": tmp_path / "runs/a", "placement": ONE_THREAD}
    (step,) = run(grpo(cut), steps=NUM_STEPS + 1, resume="must", **options)
    assert step.index == NUM_STEPS + 1
    assert step.metrics["rollout/logprob_diff"] <= 1e-5  # the rollout has the weights of the checkpoint, and so has it
    assert "the checkpoint was made with Layout(tp=1" in capfd.readouterr().err
