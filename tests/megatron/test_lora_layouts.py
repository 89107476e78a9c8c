"""Adapters trained by ActorUpdate: no layout changes what is learned, and what is exported is an adapter for PEFT."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.megatron import lora
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora

pytestmark = pytest.mark.megatron

SETTINGS: dict[str, Any] = {
    "groups_per_step": 4,
    "temperature": 0.7,
    "kl_coef": 0.1,  # no reference is wired: it is the policy without its adapters
    "old_logprobs": "rollout",  # with a ratio that is always 1 the loss would not depend on the weights
    "max_mismatch": None,
    "micro_batch_size": 2,
    "lr": 1e-2,
    "eps": 1e-4,  # or Adam would make much of gradients that are nothing but rounding
    "clip_grad": 0.1,  # below most norms: a wrong one shows in the weights
    "lora": Lora(rank=4, alpha=6.0),
}
#: Enough for two virtual chunks on two pipeline ranks.
NUM_LAYERS = 4
NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """Of one rank: its metrics by step, all weights at the end (rank 0), and whether its part of the model's own
    weights is what it was."""

    metrics: list[dict[str, Any]]
    weights: dict[str, np.ndarray]
    base_is_the_same: bool

    def values(self, name: str) -> list[float]:
        return [step[name][0] for step in self.metrics if name in step]


def train(
    world: World,
    folder: Path,
    steps: Any,
    *,
    has_ref: bool = False,
    load: Path | None = None,
    save: Path | None = None,
    out: Path | None = None,
    **settings: Any,
) -> Run:
    """Updates with the groups of each step; loads before them, saves and exports after them."""
    stage = ActorUpdate(ActorUpdate.Config(model=str(folder), **{**SETTINGS, **settings}))
    stage.has_ref = has_ref
    stage.setup(world)
    before = own_weights(stage)
    if load is not None:
        stage.load(load)
    metrics: list[dict[str, Any]] = []
    for groups in steps:
        metrics.append(stage.update(groups[stage.share_of(world.rank) :: stage.layout.dp]))
        stage.rest()
    if save is not None:
        stage.save(save)
        stage.finish_save()
    if out is not None:
        stage.export(out)
    weights = dict(stage.weights())
    after = own_weights(stage)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return Run(metrics=metrics, weights=weights, base_is_the_same=same)


def own_weights(stage: ActorUpdate) -> dict[Any, torch.Tensor]:
    return {
        (index, name): parameter.detach().clone()
        for index, chunk in enumerate(stage.session._policy.chunks)
        for name, parameter in chunk.named_parameters()
        if not lora.is_adapter(name)
    }


@pytest.fixture(scope="module")
def trained(launch: Any, tiny: Any, make_groups: Any) -> Any:
    """trained(kind, ...): the runs of all ranks after NUM_STEPS with the same groups."""

    def run(kind: str, layout: Layout | None = None, num_steps: int = NUM_STEPS, **more: Any) -> list[Run]:
        layout = layout or Layout()
        steps = [make_groups()] * num_steps
        more["layout"] = layout
        return launch(layout.size, functools.partial(train, **more), model(tiny, kind), steps)

    return run


def model(tiny: Any, kind: str) -> Path:
    """The dense one has a tied output layer, of which the last pipeline rank holds a copy."""
    return tiny(kind, kind == "qwen3", NUM_LAYERS)


@pytest.fixture(scope="module")
def one_rank(trained: Any) -> Any:
    """one_rank(kind, targets): what one rank learns."""

    @functools.cache
    def run(kind: str, targets: Any = "all-linear") -> Run:
        return trained(kind, lora=Lora(rank=4, alpha=6.0, target_modules=targets))[0]

    return run


def check(found: list[Run], wanted: Run) -> None:
    assert all(run.base_is_the_same for run in found)
    for name in ("actor/loss", "actor/grad_norm"):
        assert found[0].values(name) == pytest.approx(wanted.values(name), rel=1e-5, abs=1e-5)
    assert distance(found[0].weights, wanted.weights) <= 1e-6


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert set(a) == set(b)
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2 sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "dp2": Layout(dp=2),
    "tp2 sp pp2": Layout(tp=2, sp=True, pp=2),
}
MOE_LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp2 ep2": Layout(dp=2, ep=2),
    "tp2 sp etp2": Layout(tp=2, sp=True),
    "tp2 sp etp1": Layout(tp=2, sp=True, etp=1),
    "tp2 sp ep2 etp1": Layout(tp=2, sp=True, ep=2, etp=1),
    "pp2 dp2 ep2": Layout(pp=2, dp=2, ep=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_changes_nothing(trained: Any, one_rank: Any, layout: Layout) -> None:
    check(trained("qwen3", layout), one_rank("qwen3"))


@pytest.mark.parametrize("layout", MOE_LAYOUTS.values(), ids=MOE_LAYOUTS)
def test_layout_of_experts_changes_nothing(trained: Any, one_rank: Any, layout: Layout) -> None:
    check(trained("qwen3_moe", layout), one_rank("qwen3_moe"))


@pytest.mark.parametrize("targets", [("q_proj", "o_proj"), ("up_proj", "down_proj")], ids=["attention", "experts"])
def test_experts_or_the_rest_may_have_no_adapter(
    trained: Any, one_rank: Any, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    """One of Megatron's two optimizers has nothing to train then: it has no state to save, nor to move away."""
    settings = Lora(rank=4, alpha=6.0, target_modules=targets)
    more: dict[str, Any] = {"lora": settings, "offload": ("parameters", "gradients", "optimizer")}
    wanted = one_rank("qwen3_moe", targets)
    check(trained("qwen3_moe", Layout(dp=2, ep=2), save=tmp_path / "ck", **more), wanted)
    again = trained("qwen3_moe", Layout(dp=2, ep=2), load=tmp_path / "ck", num_steps=1, **more)
    assert again[0].values("actor/loss")[0] < wanted.values("actor/loss")[-1] + 1.0


def test_copies_of_an_experts_adapter_count_once(launch: Any, tiny: Any, make_groups: Any) -> None:
    """Ranks of one expert that no rank of the dense weights shares; over gloo both must have as many tokens."""
    steps = [[group for group in make_groups(2) for _ in range(2)]] * NUM_STEPS
    (one,) = launch(1, train, model(tiny, "qwen3_moe"), steps)
    two = Layout(dp=2, etp=2)
    check(launch(2, functools.partial(train, layout=two), model(tiny, "qwen3_moe"), steps), one)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(pp=2, vpp=2)])
def test_recomputation_changes_nothing(trained: Any, one_rank: Any, layout: Layout) -> None:
    check(trained("qwen3", layout, recompute="full"), one_rank("qwen3"))


def test_a_rest_between_steps_changes_nothing(trained: Any, one_rank: Any) -> None:
    away = ("parameters", "gradients", "optimizer")
    check(trained("qwen3_moe", Layout(dp=2, ep=2), offload=away), one_rank("qwen3_moe"))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_every_adapted_weight_is_learned_and_no_other(one_rank: Any, tiny: Any, kind: str) -> None:
    weights = one_rank(kind).weights
    source = load_file(model(tiny, kind) / "model.safetensors")
    changed = {name for name in weights if not np.array_equal(weights[name], source[name].numpy())}
    assert changed == {name for name in weights if "_proj" in name}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(dp=2, ep=2)])
def test_the_policy_begins_as_its_own_reference(trained: Any, layout: Layout) -> None:
    found = trained("qwen3_moe", layout, num_steps=2)
    first, second = zip(*(run.values("ref/kl") for run in found if run.values("ref/kl")), strict=True)
    assert set(first) == {0.0}
    assert min(second) > 0.1


def test_own_reference_equals_a_wired_one(launch: Any, tiny: Any, make_groups: Any, one_rank: Any) -> None:
    def scored(world: World) -> list[pa.RecordBatch]:
        stage = RefLogprob(RefLogprob.Config(model=str(model(tiny, "qwen3")), temperature=SETTINGS["temperature"]))
        stage.setup(world)
        groups = [group.drop_columns(["ref_logprobs"]) for group in make_groups()]
        return [group.append_column("ref_logprobs", stage.process(group)["ref_logprobs"]) for group in groups]

    (groups,) = launch(1, scored)
    (found,) = launch(1, lambda *a: train(*a, has_ref=True), model(tiny, "qwen3"), [groups] * NUM_STEPS)
    own = one_rank("qwen3")
    assert max(own.values("ref/kl")) > 1
    for name in ("ref/kl", "actor/loss"):
        assert found.values(name) == pytest.approx(own.values(name), rel=1e-6, abs=1e-6)
    assert distance(found.weights, own.weights) <= 1e-6


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2)])
def test_nan_skips_the_step_and_leaves_no_trace(
    launch: Any, tiny: Any, make_groups: Any, one_rank: Any, layout: Layout
) -> None:
    first, *rest = make_groups()
    index = first.schema.get_field_index("advantages")
    values = pa.array([[math.nan] * len(row) for row in first.column(index).to_pylist()], first.column(index).type)
    poisoned = [first.set_column(index, "advantages", values), *rest]
    steps = [poisoned, *[make_groups()] * NUM_STEPS]
    found = launch(layout.size, lambda *a: train(*a, layout=layout), model(tiny, "qwen3"), steps)
    assert found[0].values("actor/skipped_steps") == [1.0] + [0.0] * NUM_STEPS
    check(found, one_rank("qwen3"))


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("qwen3", Layout(tp=2, sp=True), Layout()),
        ("qwen3", Layout(dp=2), Layout(pp=2)),
        ("qwen3_moe", Layout(dp=2, ep=2), Layout(tp=2, sp=True)),
    ],
)
def test_a_checkpoint_can_change_its_layout(
    trained: Any, one_rank: Any, tmp_path: Path, kind: str, saved: Layout, loaded: Layout
) -> None:
    trained(kind, saved, num_steps=2, save=tmp_path / "ck")
    found = trained(kind, loaded, num_steps=2, load=tmp_path / "ck")
    assert found[0].values("actor/loss") == pytest.approx(one_rank(kind).values("actor/loss")[2:], abs=1e-5)
    assert distance(found[0].weights, one_rank(kind).weights) <= 1e-6


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3", Layout(tp=2)),
        ("qwen3", Layout(pp=2)),
        ("qwen3_moe", Layout(dp=2, ep=2)),
        ("qwen3_moe", Layout(pp=2, dp=2)),
        ("qwen3_moe", Layout(tp=2, sp=True)),
        ("mixtral", Layout(dp=2, ep=2)),
    ],
)
def test_peft_loads_what_is_exported(
    trained: Any,
    tiny: Any,
    hf_model: Any,
    hf_logprobs: Any,
    make_groups: Any,
    tmp_path: Path,
    kind: str,
    layout: Layout,
) -> None:
    import peft

    def score(hf: Any) -> torch.Tensor:
        rows = [row for group in make_groups() for row in group.to_pylist() if row["response_ids"]]
        with torch.no_grad():
            return torch.cat([hf_logprobs(hf, row["prompt_ids"], row["response_ids"]) for row in rows])

    trained(kind, layout, out=tmp_path)
    base = score(hf_model(model(tiny, kind)))
    merged = score(hf_model(tmp_path))
    adapted = score(peft.PeftModel.from_pretrained(hf_model(model(tiny, kind)), tmp_path / "adapter").eval())
    assert (merged - base).abs().max() > 0.1
    assert (adapted - merged).abs().max() <= 1e-5


def test_bfloat16_trains(trained: Any) -> None:
    found = trained("qwen3", Layout(tp=2, sp=True), dtype="bfloat16")
    assert all(run.base_is_the_same for run in found)
    assert found[0].values("ref/kl")[0] == 0.0
    losses = found[0].values("actor/loss")
    assert losses == sorted(losses, reverse=True)
