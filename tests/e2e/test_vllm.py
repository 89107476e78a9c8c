"""The whole graph with real vLLM: two replicas, tensor-parallel training, weights in flight, engines that die."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import psutil
import pytest

from rollstream import GRPO, ActorUpdate, Correction, Layout, Placement, Prompts, Reward, Rollout, grpo, run
from rollstream.graphs.checkpoint import Checkpoints
from rollstream.graphs.ledger import Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.usefixtures("ray_cluster")]


def letters(response: str, response_ids: list[int]) -> float:
    """The share of tokens that are lower-case letters."""
    return sum("a" <= c <= "z" for c in response) / len(response_ids)


def config(model: str, sums: str, **rollout) -> GRPO:
    return GRPO(
        data=Prompts.Config(path=sums, model=model, prompt="question"),
        rollout=Rollout.Config(model=model, n=8, max_tokens=8, temperature=0.7, engine="vllm", **rollout),
        reward=Reward.Config(function=letters),
        actor=ActorUpdate.Config(
            model=model,
            groups_per_step=4,
            lr=3e-3,
            temperature=0.7,
            layout=Layout(tp=2),
            correction=Correction(kind="tis"),
        ),
        max_staleness=1,
    )


def test_two_replicas_and_two_tensor_parallel_ranks_learn_while_they_overlap(tiny_chat_model, sums, tmp_path):
    graph = grpo(config(str(tiny_chat_model), str(sums), groups_in_flight=4))
    placement = Placement(replicas={"rollout": 2}, threads=1)
    steps = list(run(graph, steps=14, out=tmp_path / "out", placement=placement))
    assert steps[0].metrics["rollout/logprob_diff"] <= 1e-5
    assert max(max(s.staleness) for s in steps) == 1
    rewards = [s.metrics["reward/mean"] for s in steps]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards


def test_an_engine_killed_in_mid_generation_comes_back_and_every_group_is_trained_once(
    tiny_chat_model, sums, tmp_path, capfd
):
    """Once a step is done, the groups of the one after the next are begun, long ones here."""
    chosen = config(str(tiny_chat_model), str(sums))
    chosen = replace(chosen, rollout=replace(chosen.rollout, max_tokens=200))
    steps = run(grpo(chosen), steps=5, out=tmp_path / "out", placement=Placement(threads=1))
    indices = [next(steps).index, next(steps).index]
    hosts = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::StageHost")]
    (core,) = [p for host in hosts for p in host.children(recursive=True) if p.name().startswith("VLLM::EngineCor")]
    core.kill()
    indices += [step.index for step in steps]
    assert indices == [1, 2, 3, 4, 5]
    assert "stage rollout died and is started again" in capfd.readouterr().err
    found = Checkpoints(tmp_path / "out/checkpoints").latest()
    assert found is not None
    ledger = Ledger.from_json(found.state.ledger)
    assert (ledger.closed.frontier, ledger.closed.ahead, ledger.left) == (20, set(), {})
