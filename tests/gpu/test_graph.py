"""The whole graph on one GPU: side by side and by turns, weights that stay on it, and a run that goes on."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tiny_model

from rollstream import (
    GRPO,
    ActorUpdate,
    Correction,
    Graph,
    Placement,
    Prompts,
    RefLogprob,
    Reward,
    Rollout,
    Step,
    grpo,
    run,
)
from rollstream.graphs.crew import Crew

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.usefixtures("gpu_cluster")]

OFFLOAD = ("parameters", "gradients", "optimizer")
#: Of log-probabilities in bfloat16, mean absolute, and the k3 estimate of the KL.
MISMATCH, KL = 0.02, 1e-3


@pytest.fixture(scope="module")
def gpu_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = str(tmp_path_factory.mktemp("r"))
    ray.init(address="local", num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny model, and prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(tiny_model.write_model(folder / "model")), str(tiny_model.write_sums(folder / "sums.jsonl"))


def letters(response: str, response_ids: list[int]) -> float:
    """The share of tokens that are lower-case letters."""
    return sum("a" <= c <= "z" for c in response) / len(response_ids)


def make_graph(inputs: tuple[str, str], *, sleeps: bool = False, max_staleness: int = 0) -> Graph:
    model, sums = inputs
    args: dict[str, Any] = {"gpu_memory_utilization": 0.2, "enforce_eager": True, "enable_sleep_mode": sleeps}
    return grpo(
        GRPO(
            data=Prompts.Config(path=sums, model=model, prompt="question"),
            rollout=Rollout.Config(
                model=model, n=8, max_tokens=16, seed=None, engine="vllm", dtype="bfloat16", engine_args=args
            ),
            reward=Reward.Config(function=letters),
            ref=RefLogprob.Config(model=model, dtype="bfloat16"),
            actor=ActorUpdate.Config(
                model=model,
                groups_per_step=8,
                lr=3e-3,
                kl_coef=0.001,
                dtype="bfloat16",
                offload=OFFLOAD if sleeps else (),
                correction=Correction(kind="tis" if max_staleness else "none"),
            ),
            max_staleness=max_staleness,
        )
    )


def placed(sharing: Any) -> Placement:
    return Placement(bundles=Placement.colocated(cpus=6, gpus=1).bundles, sharing=sharing, threads=2)


def check(steps: list[Step]) -> None:
    """The engine had the trainer's weights at every step: others would be far from its log-probabilities."""
    for step in steps:
        assert step.metrics["rollout/logprob_diff"] <= MISMATCH, step
        assert step.metrics["rollout/mismatch_k3"] <= KL, step
        assert math.isfinite(step.metrics["actor/grad_norm"])


@pytest.mark.parametrize("sharing", ["side_by_side", "turns"])
def test_a_model_learns_and_engine_and_trainer_agree_at_every_step(
    inputs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str
) -> None:
    stay: list[bool] = []
    set_up = Crew.set_up
    monkeypatch.setattr(Crew, "set_up", lambda crew: (set_up(crew), stay.append(crew.weights_stay)))
    graph = make_graph(inputs, sleeps=sharing == "turns")
    steps = list(run(graph, steps=12, out=tmp_path / "out", placement=placed(sharing), save_every=None))
    check(steps)
    rewards = [step.metrics["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert stay == [True]


def test_generation_overlaps_training_within_its_bound(inputs: tuple[str, str], tmp_path: Path) -> None:
    graph = make_graph(inputs, max_staleness=1)
    steps = list(run(graph, steps=6, out=tmp_path / "out", placement=placed("side_by_side"), save_every=None))
    assert max(max(step.staleness) for step in steps) == 1
    assert steps[0].metrics["rollout/logprob_diff"] <= MISMATCH


def test_a_run_goes_on_where_it_was(inputs: tuple[str, str], tmp_path: Path) -> None:
    graph, out, placement = make_graph(inputs), tmp_path / "out", placed("side_by_side")
    first = list(run(graph, steps=2, out=out, placement=placement, export=False))
    rest = list(run(graph, steps=4, out=out, placement=placement, export=False, resume="must"))
    assert [step.index for step in first + rest] == [1, 2, 3, 4]
    check(first + rest)
