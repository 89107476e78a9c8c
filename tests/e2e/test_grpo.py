"""The real graph on a tiny model: numbers that must hold, what is kept, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollstream import GRPO, ActorUpdate, Placement, Prompts, RefLogprob, Reward, Rollout, grpo, run
from rollstream.stages.megatron.layout import Layout

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def config(tiny_chat_model, sums) -> GRPO:
    """Rewards the share of response tokens that are the letter a."""
    model = str(tiny_chat_model)
    return GRPO(
        data=Prompts.Config(path=str(sums), model=model, prompt="question"),
        rollout=Rollout.Config(model=model, n=8, max_tokens=8, temperature=0.7),
        reward=Reward.Config(function=share_of_a),
        actor=ActorUpdate.Config(model=model, groups_per_step=4, lr=3e-3, kl_coef=0.001, temperature=0.7),
        ref=RefLogprob.Config(model=model, temperature=0.7),
    )


def share_of_a(response: str, response_ids: list[int]) -> float:
    return response.count("a") / len(response_ids)


ONE_THREAD = Placement.auto(threads=1)


def test_step_one_is_exactly_on_policy_and_the_reward_rises(config, tmp_path):
    steps = list(run(grpo(config), steps=14, out=tmp_path / "runs/a", placement=ONE_THREAD))
    first = steps[0].metrics
    assert first["actor/ratio"] == 1.0
    assert first["actor/kl"] == 0.0
    assert first["ref/kl"] <= 1e-6
    assert first["rollout/logprob_diff"] <= 1e-5
    rewards = [s.metrics["reward/mean"] for s in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    assert max(s.metrics["rollout/logprob_diff"] for s in steps) <= 1e-4  # new weights reach the engine each step


def test_what_a_run_keeps(config, tmp_path):
    """The MLflow record, and a model that transformers loads and that is the trained one."""
    from mlflow import MlflowClient
    from transformers import AutoModelForCausalLM

    graph = grpo(config)
    *_, last = run(graph, steps=2, out=tmp_path / "runs/a", placement=ONE_THREAD)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    assert record.info.status == "FINISHED"
    assert record.data.params["rollout.temperature"] == "0.7"
    assert [m.step for m in client.get_metric_history(record.info.run_id, "reward/mean")] == [1, 2]
    assert record.data.metrics["actor/loss"] == pytest.approx(last.metrics["actor/loss"])
    kept = {a.path for a in client.list_artifacts(record.info.run_id)}
    assert {"graph.txt", "settings.json", "samples"} <= kept
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/a/model")
    start = AutoModelForCausalLM.from_pretrained(config.actor.model)
    changed = (model.model.embed_tokens.weight - start.model.embed_tokens.weight).abs().max().item()
    assert changed > 1e-3


def test_two_tensor_parallel_ranks_give_the_same_numbers(config, tmp_path):
    one = list(run(grpo(config), steps=2, out=tmp_path / "runs/1", placement=ONE_THREAD))
    layout = Layout(tp=2)
    two = replace(config, actor=replace(config.actor, layout=layout), ref=replace(config.ref, layout=layout))
    pair = list(run(grpo(two), steps=2, out=tmp_path / "runs/2", placement=ONE_THREAD))
    for name in ("reward/mean", "actor/entropy", "actor/grad_norm", "rollout/response_tokens"):
        assert pair[0].metrics[name] == pytest.approx(one[0].metrics[name], rel=1e-4), name
    assert pair[0].metrics["ref/kl"] <= 1e-6


def test_overlapped_generation_trains_on_the_rollouts_own_logprobs(config, tmp_path):
    late = replace(config, max_staleness=1, actor=replace(config.actor, old_logprobs="rollout"))
    steps = list(run(grpo(late), steps=4, out=tmp_path / "runs/a", placement=ONE_THREAD))
    assert max(s.metrics["rollout/staleness"] for s in steps) == 1.0
    assert steps[-1].metrics["actor/ratio"] != 1.0


def test_a_run_goes_on_in_another_layout(config, tmp_path, capfd):
    options = {"out": tmp_path / "a", "placement": ONE_THREAD}
    list(run(grpo(config), steps=1, **options))
    cut = replace(config, actor=replace(config.actor, layout=Layout(tp=2)))
    (step,) = run(grpo(cut), steps=2, resume="must", **options)
    assert step.index == 2
    assert step.metrics["rollout/logprob_diff"] <= 1e-5  # the rollout has the weights of the checkpoint, and so has it
    assert "the checkpoint was made with Layout(tp=1" in capfd.readouterr().err
