"""Adapters trained by ActorUpdate: no layout changes what is learned, and what is exported is an adapter for PEFT."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.megatron import lora
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora

pytestmark = pytest.mark.megatron

LORA = Lora(rank=4, alpha=6.0)
SETTINGS: dict[str, Any] = {
    "groups_per_step": 4,
    "temperature": 0.7,
    "kl_coef": 0.1,  # no reference is wired: it is the policy without its adapters
    "old_logprobs": "rollout",  # with a ratio that is always 1 the loss would not depend on the weights
    "max_mismatch": None,
    "micro_batch_size": 2,
    "lr": 1e-3,
    "eps": 1e-4,  # or Adam would make much of gradients that are nothing but rounding
    "lora": LORA,
}
#: Enough for two virtual chunks on two pipeline ranks.
NUM_LAYERS = 4
NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """Of one rank: the first rank's metrics by step, all weights at the end (rank 0), and whether this rank's part of
    the model's own weights is what it was."""

    metrics: list[dict[str, Any]]
    weights: dict[str, np.ndarray]
    base_is_the_same: bool

    def values(self, name: str) -> list[float]:
        return [step[name][0] for step in self.metrics]


def train(world: World, folder: Path, groups: Any, out: Path | None = None, **settings: Any) -> Run:
    """NUM_STEPS updates with the same groups; exports to `out`."""
    stage = ActorUpdate(ActorUpdate.Config(model=str(folder), **{**SETTINGS, **settings}))
    stage.setup(world)
    before = own_weights(stage)
    share = groups[stage.share_of(world.rank) :: stage.layout.dp]
    metrics = [stage.update(share) for _ in range(NUM_STEPS)]
    after = own_weights(stage)
    if out is not None:
        stage.export(out)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return Run(metrics=metrics, weights=dict(stage.weights()), base_is_the_same=same)


def own_weights(stage: ActorUpdate) -> dict[Any, torch.Tensor]:
    return {
        (index, name): parameter.detach().clone()
        for index, chunk in enumerate(stage.session._policy.chunks)
        for name, parameter in chunk.named_parameters()
        if not lora.is_adapter(name)
    }


@pytest.fixture(scope="module")
def one_rank(launch: Any, tiny: Any, make_groups: Any) -> Any:
    """one_rank(kind, tied): its run."""

    @functools.cache
    def run(kind: str, tied: bool = False) -> Run:
        (found,) = launch(1, train, tiny(kind, tied, NUM_LAYERS), make_groups())
        return found

    return run


def check(found: list[Run], wanted: Run) -> None:
    assert all(run.base_is_the_same for run in found)
    for name, tolerance in (("actor/loss", 1e-5), ("actor/grad_norm", 1e-4)):
        print(name, wanted.values(name), max(abs(a - b) for a, b in zip(found[0].values(name), wanted.values(name))))
    for name in wanted.weights:
        pass
    print("weights", max(np.abs(found[0].weights[n] - w).max() for n, w in wanted.weights.items()))


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
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)], ids=["qwen3", "llama tied"])
def test_layout_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, one_rank: Any, kind: str, tied: bool, layout: Layout
) -> None:
    found = launch(layout.size, lambda *a: train(*a, layout=layout), tiny(kind, tied, NUM_LAYERS), make_groups())
    check(found, one_rank(kind, tied))


@pytest.mark.parametrize("layout", MOE_LAYOUTS.values(), ids=MOE_LAYOUTS)
def test_layout_of_experts_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, one_rank: Any, layout: Layout
) -> None:
    folder = tiny("qwen3_moe", False, NUM_LAYERS)
    check(launch(layout.size, lambda *a: train(*a, layout=layout), folder, make_groups()), one_rank("qwen3_moe"))
