"""Loss and gradients before Adam agree with a plain transformers implementation, however the batch is cut."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.mcore import state

pytestmark = pytest.mark.megatron

SETTINGS: dict[str, Any] = {
    "groups_per_step": 4,
    "temperature": 0.7,
    "kl_coef": 0.1,
    "old_logprobs": "rollout",  # away from the current ones: ratios differ from 1 and all clips are at work
    "max_mismatch": None,
    "clip_high": 0.28,
}
#: Settings of runs of several steps: at a higher rate Adam makes much of what is nothing but rounding.
STEPS: dict[str, Any] = {"lr": 1e-4, "micro_batch_size": 2}
#: Enough for two virtual chunks on two pipeline ranks.
NUM_LAYERS = 4
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def gradients(
    world: World, folder: Path, groups: list[pa.RecordBatch], settings: dict[str, Any], steps: int = 1
) -> Any:
    """Losses of `steps` updates with the same groups, and the first one's gradients in Hugging Face names on rank 0,
    taken where the optimizer would step."""
    stage = ActorUpdate(ActorUpdate.Config(model=str(folder), **{**SETTINGS, **settings}))
    stage.has_ref = True
    stage.setup(world)
    trainer, found = stage.session._trainer, {}
    step = trainer.step

    def first_step() -> float:
        trainer.step = step
        found.update(_gathered(trainer, stage))
        return step()

    trainer.step = first_step
    share = groups[stage.share_of(world.rank) :: stage.layout.dp]
    losses = [stage.update(share).get("actor/loss", (None, 0))[0] for _ in range(steps)]
    return losses, found


def _gathered(trainer: Any, stage: ActorUpdate) -> dict[str, np.ndarray]:
    """By now each data-parallel rank holds the sum of its own shard only: the shards are gathered first."""
    for chunk in trainer.ddp:
        dense = [(buffer, state.get_data_parallel_group()) for buffer in chunk.buffers]
        expert = [(buffer, state.get_expert_data_parallel_group()) for buffer in chunk.expert_parallel_buffers]
        for buffer, group in dense + expert:
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    parameters = [p for chunk in trainer.policy.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = dict(stage.weights())
        for parameter, values in zip(parameters, before, strict=True):
            parameter.copy_(values)
    return found


@pytest.fixture(scope="module")
def reference(tiny: Any, hf_model: Any, hf_logprobs: Any, make_groups: Any) -> Any:
    """reference(kind, tied, aggregation): loss and gradients of one sample after another."""

    @functools.cache
    def compute(
        kind: str, tied: bool = False, aggregation: str = "token-mean", num_layers: int = 2
    ) -> tuple[float, dict[str, np.ndarray]]:
        model = hf_model(tiny(kind, tied, num_layers))
        rows = [row for group in make_groups() for row in group.to_pylist()]
        num_tokens = sum(sum(row["loss_mask"]) for row in rows)
        total = torch.zeros(())
        for row in rows:
            if not row["response_ids"]:
                continue
            length = max(sum(row["loss_mask"]), 1)
            scale = {
                "token-mean": 1 / num_tokens,
                "seq-mean-token-mean": 1 / (len(rows) * length),
                "seq-mean-token-sum-norm": 1 / (len(rows) * 32),
            }[aggregation]
            logprobs = hf_logprobs(model, row["prompt_ids"], row["response_ids"], 0.7)
            total = total + scale * (token_loss(logprobs, row) * torch.tensor(row["loss_mask"])).sum()
        total.backward()
        gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        return total.item(), separate_experts(gradients, kind)

    return compute


def token_loss(logprobs: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """Clipped loss with dual clip 3, and 0.1 times a KL with the value of k3 and the gradient of k2."""
    advantage = torch.tensor(row["advantages"])
    ratio = (logprobs - torch.tensor(row["rollout_logprobs"])).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    loss = torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss)
    d = logprobs - torch.tensor(row["ref_logprobs"])
    return loss + 0.1 * (0.5 * d**2 + ((-d).exp() - 1 + d - 0.5 * d**2).detach())


def separate_experts(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """transformers holds the experts of a layer in one tensor; in a folder each has its own."""
    found: dict[str, np.ndarray] = {}
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp", GATE_UP_DOWN)
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".mlp.")
        if part == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for linear, half in zip(names[:2], np.split(both, 2), strict=True):
                    found[f"{layer}.{block}.experts.{expert}.{linear}.weight"] = half
        elif part == "experts.down_proj":
            found |= {f"{layer}.{block}.experts.{e}.{names[2]}.weight": down for e, down in enumerate(tensor)}
        elif part == "gate.weight":
            found[f"{layer}.{block}.gate.weight"] = tensor
        else:
            found[name] = tensor
    return found


def check(found: Any, wanted: Any) -> None:
    (losses, grads), (wanted_loss, wanted_grads) = found, wanted
    assert losses[0] == pytest.approx(wanted_loss, abs=1e-6, rel=1e-6)
    assert set(grads) == set(wanted_grads)
    for name, gradient in wanted_grads.items():
        relative = np.linalg.norm(grads[name] - gradient) / np.linalg.norm(gradient)
        assert relative <= 1e-5, (name, relative)


LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2 sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2),
    "pp2 uneven": Layout(pp=2, first_layers=3),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "dp2": Layout(dp=2),
    "tp2 dp2": Layout(tp=2, dp=2),
    "tp2 pp2": Layout(tp=2, pp=2),
    "tp2 sp pp2 vpp2": Layout(tp=2, sp=True, pp=2, vpp=2),
}
MOE_LAYOUTS = {
    "one rank": Layout(),
    "dp2": Layout(dp=2),
    "dp2 ep2": Layout(dp=2, ep=2),
    "tp2 sp etp2": Layout(tp=2, sp=True),
    "tp2 sp etp1": Layout(tp=2, sp=True, etp=1),
    "tp2 sp ep2 etp1": Layout(tp=2, sp=True, ep=2, etp=1),
    "pp2 dp2 ep2": Layout(pp=2, dp=2, ep=2),
}


@pytest.fixture(scope="module")
def losses_of_one_rank(launch: Any, tiny: Any, make_groups: Any) -> Any:
    """losses_of_one_rank(kind, tied): of four steps."""

    @functools.cache
    def train(kind: str, tied: bool = False) -> list[float]:
        ((losses, _),) = launch(1, gradients, tiny(kind, tied, NUM_LAYERS), make_groups(), STEPS, 4)
        return losses

    return train


def check_layout(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, one_rank: Any, kind: str, tied: bool, layout: Layout
) -> None:
    settings = {"layout": layout, **STEPS}
    found = launch(layout.size, gradients, tiny(kind, tied, NUM_LAYERS), make_groups(), settings, 4)
    check(found[0], reference(kind, tied, num_layers=NUM_LAYERS))
    assert found[0][0] == pytest.approx(one_rank(kind, tied), abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)], ids=["qwen3", "llama tied"])
def test_layout_changes_nothing(
    launch: Any,
    tiny: Any,
    make_groups: Any,
    reference: Any,
    losses_of_one_rank: Any,
    kind: str,
    tied: bool,
    layout: Any,
) -> None:
    check_layout(launch, tiny, make_groups, reference, losses_of_one_rank, kind, tied, layout)


@pytest.mark.parametrize("layout", MOE_LAYOUTS.values(), ids=MOE_LAYOUTS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_layout_of_experts_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, losses_of_one_rank: Any, kind: str, layout: Layout
) -> None:
    check_layout(launch, tiny, make_groups, reference, losses_of_one_rank, kind, False, layout)


CUTS: dict[str, dict[str, Any]] = {
    "one by one": {"micro_batch_size": 1},
    "two": {"micro_batch_size": 2},
    "all": {},
    "40 tokens": {"max_tokens_per_micro_batch": 40},
    "70 tokens": {"max_tokens_per_micro_batch": 70},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
    "full recompute in a pipeline": {"recompute": "full", "micro_batch_size": 2, "layout": Layout(pp=2)},
    "one by one in a pipeline": {"micro_batch_size": 1, "layout": Layout(pp=2)},
    "50 tokens in two shares": {"max_tokens_per_micro_batch": 50, "layout": Layout(dp=2)},
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_cut_and_recompute_change_nothing(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, cut: dict[str, Any]
) -> None:
    found = launch(cut.get("layout", Layout()).size, gradients, tiny("qwen2"), make_groups(), cut)
    check(found[0], reference("qwen2"))


def test_padding_every_response_changes_nothing(launch: Any, tiny: Any, make_groups: Any, reference: Any) -> None:
    padded = [pad_responses(group, 25) for group in make_groups()]
    check(launch(1, gradients, tiny("qwen2"), padded, {})[0], reference("qwen2"))


def pad_responses(group: pa.RecordBatch, width: int) -> pa.RecordBatch:
    """Tokens that are not trained on, up to `width` of them in each response."""
    for name in ("response_ids", "loss_mask", "advantages", "rollout_logprobs", "ref_logprobs"):
        index, column = group.schema.names.index(name), group.column(name)
        filler = [False] if name == "loss_mask" else [7]
        rows = [row + filler * (width - len(row)) for row in column.to_pylist()]
        group = group.set_column(index, group.schema.field(index), pa.array(rows, column.type))
    return group


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_order_of_groups_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, aggregation: str
) -> None:
    groups = [group.take(pa.array([2, 0, 1])) for group in make_groups()]
    random.Random(5).shuffle(groups)
    settings = {"aggregation": aggregation, "max_response_tokens": 32, "layout": Layout(dp=2), "micro_batch_size": 2}
    found = launch(2, gradients, tiny("qwen2"), groups, settings)
    check(found[0], reference("qwen2", False, aggregation))


#: Bounds that cut some tokens or samples of `near_groups`, and not others.
CORRECTIONS = {
    "tis": Correction(kind="tis"),
    "mask": Correction(kind="mask", high=2.0),
    "seq-tis": Correction(kind="seq-tis", low=0.1, high=8.0),
    "seq-mask": Correction(kind="seq-mask", low=0.3, high=1.5),
}
CORRECTED_CUTS: dict[str, dict[str, Any]] = {
    "one by one": {"micro_batch_size": 1},
    "all": {},
    "60 tokens in two shares": {"max_tokens_per_micro_batch": 60, "layout": Layout(dp=2)},
    "two in a pipeline": {"micro_batch_size": 2, "layout": Layout(pp=2)},
}


@pytest.fixture(scope="module")
def corrected(tiny: Any, hf_model: Any, hf_logprobs: Any, near_groups: Any) -> Any:
    """corrected(kind): loss, gradients, and share of cut tokens, of one sample after another."""

    @functools.cache
    def compute(kind: str) -> tuple[float, dict[str, np.ndarray], float]:
        model = hf_model(tiny("qwen2"))
        rows = [row for group in near_groups for row in group.to_pylist() if row["response_ids"]]
        num_tokens = sum(sum(row["loss_mask"]) for row in rows)
        total, num_cut = torch.zeros(()), 0
        for row in rows:
            mask = torch.tensor(row["loss_mask"])
            logprobs = hf_logprobs(model, row["prompt_ids"], row["response_ids"], 0.7)
            log_ratio = (logprobs.detach() - torch.tensor(row["rollout_logprobs"]))[mask]
            weights, cut = behaviour_weights(log_ratio, CORRECTIONS[kind])
            surrogate = -torch.tensor(row["advantages"])[mask] * (logprobs - logprobs.detach()).exp()[mask]
            d = (logprobs - torch.tensor(row["ref_logprobs"]))[mask]
            penalty = 0.5 * d**2 + ((-d).exp() - 1 + d - 0.5 * d**2).detach()
            total = total + (weights * surrogate + 0.1 * penalty).sum() / num_tokens
            num_cut += int(cut.sum())
        total.backward()
        grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        return total.item(), grads, num_cut / num_tokens

    return compute


def behaviour_weights(log_ratio: torch.Tensor, settings: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the trained tokens of one sample, and which are cut, written out for each kind."""
    low, high = settings.bounds
    ratio, product, mean = log_ratio.exp(), log_ratio.sum().exp(), log_ratio.mean().exp()
    judged = {"tis": ratio, "mask": ratio, "seq-tis": product.expand_as(ratio), "seq-mask": mean.expand_as(ratio)}
    cut = (judged[settings.kind] < low) | (judged[settings.kind] > high)
    if settings.kind in ("mask", "seq-mask"):
        return ratio * ~cut, cut
    return judged[settings.kind].clip(low, high), cut


@pytest.fixture(scope="module")
def near_groups(tiny: Any, hf_model: Any, hf_logprobs: Any, make_groups: Any) -> list[pa.RecordBatch]:
    """Groups whose rollout log-probabilities are 0.3 or so from the model's own, a sample's all to one side."""
    model, rng = hf_model(tiny("qwen2")), np.random.default_rng(11)
    groups: list[pa.RecordBatch] = []
    for group in make_groups():
        values: list[list[float]] = []
        for row in group.to_pylist():
            own = hf_logprobs(model, row["prompt_ids"], row["response_ids"], 0.7).detach().numpy()
            values.append((own + rng.normal() * 0.4 + rng.normal(size=len(own)) * 0.6).tolist())
        index = group.schema.names.index("rollout_logprobs")
        column = pa.array(values, group.column("rollout_logprobs").type)
        groups.append(group.set_column(index, group.schema.field(index), column))
    return groups


@pytest.mark.parametrize("cut", CORRECTED_CUTS.values(), ids=CORRECTED_CUTS)
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_cut_and_layout_do_not_change_a_correction(
    launch: Any, tiny: Any, near_groups: Any, corrected: Any, kind: str, cut: dict[str, Any]
) -> None:
    settings = {"old_logprobs": "trainer", "correction": CORRECTIONS[kind], **cut}
    found = launch(cut.get("layout", Layout()).size, gradients, tiny("qwen2"), near_groups, settings)
    loss, grads, share = corrected(kind)
    check(found[0], (loss, grads))
    assert 0.05 < share < 0.8  # the bounds are at work
