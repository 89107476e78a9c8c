"""A checkpoint of one layout goes on in another: the same losses as where it was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import Metrics, World
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.optimizer import parts_of
from rollstream.stages.megatron.optimizer_state import boxes, progress

pytestmark = pytest.mark.megatron

# Moments and weight decay of the optimizer, and the schedule, show in the losses that follow. Gradients are clipped, so
# that their norm must be right too.
SETTINGS: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 3, "decay": "cosine", "decay_steps": 9, "weight_decay": 0.01}
SETTINGS["old_logprobs"] = "rollout"  # with a ratio that is always 1 the loss would not depend on the weights


class Task(NamedTuple):
    """What a run of some steps is given."""

    model: Path
    layout: Layout
    settings: dict[str, Any]
    load: Path | None = None
    save: Path | None = None


def make_stage(task: Task) -> ActorUpdate:
    settings = SETTINGS | task.settings
    return ActorUpdate(
        ActorUpdate.Config(model=str(task.model), groups_per_step=2, max_mismatch=None, layout=task.layout, **settings)
    )


def train(world: World, task: Task, steps: list[list[pa.RecordBatch]]) -> list[dict[str, tuple[float, float]]]:
    """This rank's part of each step's metrics. Loads before the first of `steps` and saves after the second."""
    stage = make_stage(task)
    stage.setup(world)
    if task.load is not None:
        stage.load(task.load)
    told: list[dict[str, tuple[float, float]]] = []
    for index, step in enumerate(steps):
        if index == 2 and task.save is not None:
            stage.save(task.save)
        told.append(stage.update(step[stage.share_of(world.rank) :: task.layout.dp]))
    stage.finish_save()
    stage.close()
    return told


def run(launch: Any, task: Task, steps: list[list[pa.RecordBatch]]) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step, over all ranks."""
    results: list[tuple[float, float, float]] = []
    for of_ranks in zip(*launch(task.layout.size, train, task, steps), strict=True):
        sums = Metrics()
        for metrics in of_ranks:
            sums.merge(metrics)
        means = sums.means()
        results.append((means["actor/loss"], means["actor/grad_norm"], means["actor/lr"]))
    return results


ONE = Layout()
LORA = {"lora": Lora(rank=4)}
#: Model, layout that saves, layout that loads, settings.
WAYS: dict[str, tuple[str, Layout, Layout, dict[str, Any]]] = {
    "tp 2 to dp 2": ("qwen3", Layout(tp=2), Layout(dp=2), {}),
    "tp 2 to pp 2": ("qwen3", Layout(tp=2), Layout(pp=2), {}),
    "tied, tp 2 to pp 2": ("qwen2 tied", Layout(tp=2), Layout(pp=2), {}),
    "tied, pp 2 to one rank": ("qwen2 tied", Layout(pp=2), ONE, {}),
    "dp 2 to tp 2": ("llama", Layout(dp=2), Layout(tp=2), {}),
    "dp 2 ep 2 to one rank": ("qwen3_moe", Layout(dp=2, ep=2), ONE, {}),
    "one rank to dp 2 ep 2": ("qwen3_moe", ONE, Layout(dp=2, ep=2), {}),
    "tp 2 sp etp 2 to pp 2": ("qwen3_moe", Layout(tp=2, sp=True), Layout(pp=2), {}),
    "tp 2 sp pp 2 vpp 2 to one rank": ("qwen3 deep", Layout(tp=2, sp=True, pp=2, vpp=2), ONE, {}),
    "uneven pp 2 to one rank": ("qwen3 deep", Layout(pp=2, first_layers=1), ONE, {}),
    "one rank to tp 2 sp pp 2 vpp 2": ("qwen3 deep", ONE, Layout(tp=2, sp=True, pp=2, vpp=2), {}),
    "lora, tp 2 to one rank": ("qwen3", Layout(tp=2), ONE, LORA),
    "lora, one rank to pp 2": ("qwen3", ONE, Layout(pp=2), LORA),
    "lora, dp 2 ep 2 to one rank": ("qwen3_moe", Layout(dp=2, ep=2), ONE, LORA),
}


def model_of(tiny: Any, name: str) -> Path:
    kind, *more = name.split()
    return tiny(kind, "tied" in more, 4 if "deep" in more else 2)


@pytest.mark.parametrize("way", WAYS)
def test_the_next_losses_are_those_of_the_layout_that_saved(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, way: str
) -> None:
    model, before, after, settings = WAYS[way]
    steps = [make_groups(num_groups=2, seed=seed) for seed in range(5)]
    saving = Task(model_of(tiny, model), before, settings, save=tmp_path / "ck")
    straight = run(launch, saving, steps)[2:]
    resumed = run(launch, saving._replace(layout=after, save=None, load=tmp_path / "ck"), steps[2:])
    np.testing.assert_allclose(resumed, straight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_masters_of_half_precision_weights_are_the_same_bits_in_another_layout(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, dtype: str
) -> None:
    """The arithmetic of layouts differs at once there, so that losses tell nothing."""
    task = Task(tiny("qwen3"), Layout(tp=2), {"dtype": dtype}, save=tmp_path / "ck")
    run(launch, task, [make_groups(num_groups=2, seed=seed) for seed in range(3)])

    def loaded(world: World, layout: Layout) -> tuple[str, dict[str, Any], dict[str, Any]]:
        stage = make_stage(task._replace(layout=layout))
        stage.setup(world)
        stage.load(tmp_path / "ck")
        optimizer, weights = stage.session._trainer.optimizer, dict(stage.weights())
        for part in parts_of(optimizer):
            part._copy_main_params_to_model_params()  # as a step makes the weights
        return str(progress(optimizer)), weights, dict(stage.weights())

    (one, weights, made) = launch(1, loaded, ONE)[0]
    (two, others, made_there) = launch(2, loaded, Layout(pp=2))[0]
    assert one == two
    assert "'steps': 2" in one
    assert ("65536." in one) == (dtype == "float16")  # the loss scale
    for name, weight in weights.items():
        assert all(np.array_equal(weight, found[name]) for found in (made, others, made_there)), name


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_hold_a_run_of_entries_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    low = data.draw(st.integers(0, whole.size))
    high = data.draw(st.integers(low, whole.size))
    found = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in boxes(shape, low, high)]
    assert [entry for part in found for entry in part.ravel()] == list(range(low, high))
    assert len(found) <= 2 * len(shape) - 1
