"""What only a CUDA device can show; skipped without one. One rank: a world of several needs as many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron import cpu_platform

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

KINDS = ("qwen2", "llama", "qwen3_moe")


def make_stage(folder: Path, **settings: Any) -> ActorUpdate:
    config = {"groups_per_step": 4, "max_mismatch": None, "lr": 1e-3, **settings}
    stage = ActorUpdate(ActorUpdate.Config(model=str(folder), **config))
    stage.has_ref = True
    stage.setup(World())
    return stage


def score(world: World, folder: Path, group: Any, dtype: str) -> list[Any]:
    stage = RefLogprob(RefLogprob.Config(model=str(folder), dtype=dtype))
    stage.setup(world)
    assert cpu_platform.device().type == "cuda"
    return stage.process(group)["ref_logprobs"].to_pylist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e-5), ("bfloat16", 0.05), ("float16", 0.01)])
def test_logprobs_agree_with_transformers_on_the_host(
    launch: Any, tiny: Any, hf_model: Any, hf_logprobs: Any, make_groups: Any, kind: str, dtype: str, mean: float
) -> None:
    folder, (group,) = tiny(kind), make_groups(num_groups=1, samples=8)
    ours = launch(1, score, folder, group, dtype)[0]
    model, gaps = hf_model(folder), []
    for row, got in zip(group.to_pylist(), ours, strict=True):
        wanted = hf_logprobs(model, row["prompt_ids"], row["response_ids"]).detach().numpy()
        gaps += np.abs(np.array(got) - wanted).tolist()
    print(kind, dtype, "mean", np.mean(gaps), "max", np.max(gaps))  # noqa: T201
    assert np.mean(gaps) <= mean


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_learns(launch: Any, tiny: Any, make_groups: Any, kind: str, dtype: str) -> None:
    def train(world: World) -> list[float]:
        stage = make_stage(
            tiny(kind), dtype=dtype, old_logprobs="rollout"
        )  # the current ones would hold the loss fixed
        return [stage.update(make_groups())["actor/loss"][0] for _ in range(5)]

    (losses,) = launch(1, train)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rest_frees_the_device_and_changes_nothing(launch: Any, tiny: Any, make_groups: Any, dtype: str) -> None:
    def train(world: World, kinds: tuple[str, ...]) -> tuple[int, int, dict[str, np.ndarray]]:
        stage, freed, told = make_stage(tiny("qwen2"), dtype=dtype, offload=kinds), 0, 0
        for seed in range(3):
            stage.update(make_groups(seed=seed))
            before = torch.cuda.memory_allocated()
            told = stage.session._trainer.offload.leave()
            freed = before - torch.cuda.memory_allocated()
        return freed, told, dict(stage.weights())

    freed, told, weights = launch(1, train, ("parameters", "gradients", "optimizer"))[0]
    *_, without = launch(1, train, ())[0]
    assert told >= 16 * sum(weight.size for weight in without.values())  # at least weight, gradient and two moments
    assert freed >= told
    assert all(np.array_equal(weights[name], without[name]) for name in without)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_resumed_run_goes_on_as_it_would_have(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, dtype: str
) -> None:
    def train(world: World, resume: bool) -> list[float]:
        stage = make_stage(tiny("qwen2"), dtype=dtype)
        if resume:
            stage.load(tmp_path / "ck")
        else:
            stage.update(make_groups(seed=1))
            stage.save(tmp_path / "ck")
            stage.finish_save()
        return [stage.update(make_groups(seed=seed))["actor/loss"][0] for seed in (2, 3)]

    (straight,), (resumed,) = launch(1, train, False), launch(1, train, True)
    assert resumed == pytest.approx(straight, rel=1e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_gives_the_same_losses(launch: Any, tiny: Any, make_groups: Any, recompute: str) -> None:
    def train(world: World, recompute: str) -> list[float]:
        stage = make_stage(tiny("llama"), dtype="bfloat16", recompute=recompute)
        return [stage.update(make_groups())["actor/loss"][0] for _ in range(3)]

    assert launch(1, train, recompute)[0] == pytest.approx(launch(1, train, "none")[0], abs=1e-3)
