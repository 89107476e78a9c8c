"""A resumed run goes on exactly where the saved one stood."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.megatron import checkpoint_writer
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.mcore import get_cuda_rng_tracker

pytestmark = pytest.mark.megatron

SETTINGS: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 3, "decay": "cosine", "decay_steps": 9, "weight_decay": 0.01}
SETTINGS["old_logprobs"] = "rollout"  # with a ratio that is always 1 the loss would not depend on the weights


def train(
    world: World,
    model: Path,
    steps: list[list[pa.RecordBatch]],
    layout: Layout,
    save_after: int | None,
    folder: Path,
) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Losses, learning rates and random draws of `steps`, and the weights at the end.

    Saves before step `save_after`, counted from 0; None begins by loading.
    """
    config = ActorUpdate.Config(model=str(model), groups_per_step=2, max_mismatch=None, layout=layout, **SETTINGS)
    stage = ActorUpdate(config)
    stage.setup(world)
    if save_after is None:
        stage.load(folder)
    seen: list[Any] = []
    for index, step in enumerate(steps):
        if index == save_after:
            stage.save(folder)  # written while the next step trains
        metrics = stage.update(step[stage.share_of(world.rank) :: layout.dp])
        seen.append((metrics.get("actor/loss"), metrics.get("actor/lr"), draw()))
    stage.finish_save()
    return seen, dict(stage.weights())


def draw() -> tuple[float, float]:
    """One number from each of a rank's random states."""
    with on_platform(), get_cuda_rng_tracker().fork():
        of_rank = float(torch.rand(()))
    return of_rank, float(torch.rand(()))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2)], ids=["one rank", "tp 2", "dp 2"])
@pytest.mark.parametrize("save_after", [0, 2])
def test_continues_bit_for_bit(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, layout: Layout, save_after: int
) -> None:
    steps = [make_groups(num_groups=2, seed=seed) for seed in range(4)]
    size = layout.size
    straight = launch(size, train, tiny("qwen3"), steps, layout, save_after, tmp_path / "ck")
    resumed = launch(size, train, tiny("qwen3"), steps[save_after:], layout, None, tmp_path / "ck")
    assert [seen for seen, _ in resumed] == [seen[save_after:] for seen, _ in straight]
    assert all(np.array_equal(resumed[0][1][name], weight) for name, weight in straight[0][1].items())


def test_resumed_run_is_not_gated(launch: Any, tiny: Any, make_groups: Any, tmp_path: Path) -> None:
    def resume(world: World, save: bool) -> float:
        limit = None if save else 1e-9
        config = ActorUpdate.Config(model=str(tiny("llama")), groups_per_step=4, max_mismatch=limit)
        stage = ActorUpdate(config)
        stage.setup(world)
        (stage.save if save else stage.load)(tmp_path / "ck")
        stage.finish_save()
        return stage.update(make_groups())["actor/skipped_steps"][0]

    assert launch(1, resume, True) == [0.0]
    assert launch(1, resume, False) == [0.0]


def test_what_is_saved_is_what_was_there_when_the_save_began(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nothing is written before the next step has trained, on both ranks."""

    def run(world: World) -> list[dict[str, np.ndarray]]:
        trained = threading.Event()

        def save_tensors(*args: Any, **options: Any) -> Any:
            assert trained.wait(60)
            return torch_save(*args, **options)

        torch_save = checkpoint_writer.save_tensors
        monkeypatch.setattr(checkpoint_writer, "save_tensors", save_tensors)
        config = ActorUpdate.Config(
            model=str(tiny("llama")), groups_per_step=2, max_mismatch=None, layout=Layout(dp=2), lr=1e-3
        )
        stage = ActorUpdate(config)
        stage.setup(world)
        weights = [dict(stage.weights())]
        stage.save(tmp_path / "ck")
        stage.update(make_groups(num_groups=2)[world.rank :: 2])
        weights.append(dict(stage.weights()))
        trained.set()
        stage.finish_save()
        stage.load(tmp_path / "ck")
        return [*weights, dict(stage.weights())]

    before, after, loaded = launch(2, run)[0]
    assert all(np.array_equal(before[name], loaded[name]) for name in before)
    assert not all(np.array_equal(before[name], after[name]) for name in before)
