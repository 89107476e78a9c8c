"""Loss and gradients before Adam agree with a plain transformers implementation, however the batch is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
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
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def gradients(world: World, folder: Path, groups: list[pa.RecordBatch], settings: dict[str, Any]) -> Any:
    """(loss, gradients in Hugging Face names) of rank 0, taken where the optimizer would step.

    By then each data-parallel rank holds the sum of its own shard only: the shards are gathered first.
    """
    stage = ActorUpdate(ActorUpdate.Config(model=str(folder), **{**SETTINGS, **settings}))
    stage.has_ref = True
    stage.setup(world)
    trainer = stage.session._trainer
    found: dict[str, Any] = {}

    def step() -> float:
        for bucket in (bucket for buffer in trainer.ddp.buffers for bucket in buffer.buckets):
            mine = bucket.grad_data.chunk(stage.layout.dp)[stage.share_of(world.rank)].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, mine, group=state.get_data_parallel_group())
        with torch.no_grad():
            for parameter in trainer.policy.model.parameters():
                parameter.copy_(parameter.main_grad)
        found.update(stage.weights())
        return 1.0

    trainer.step = step
    share = groups[stage.share_of(world.rank) :: stage.layout.dp]
    return stage.update(share).get("actor/loss"), found


@pytest.fixture(scope="module")
def reference(tiny: Any, hf_model: Any, hf_logprobs: Any, make_groups: Any) -> Any:
    """reference(kind, tied, aggregation): loss and gradients of one sample after another."""

    def compute(kind: str, tied: bool, aggregation: str) -> tuple[float, dict[str, np.ndarray]]:
        model = hf_model(tiny(kind, tied))
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
        return total.item(), {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}

    return compute


def token_loss(logprobs: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """Clipped loss with dual clip 3, and 0.1 times a KL with the value of k3 and the gradient of k2."""
    advantage = torch.tensor(row["advantages"])
    ratio = (logprobs - torch.tensor(row["rollout_logprobs"])).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    loss = torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss)
    d = logprobs - torch.tensor(row["ref_logprobs"])
    return loss + 0.1 * (0.5 * d**2 + ((-d).exp() - 1 + d - 0.5 * d**2).detach())


def check(found: Any, wanted: Any) -> None:
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    assert loss[0] == pytest.approx(wanted_loss, abs=1e-6, rel=1e-6)
    assert set(grads) == set(wanted_grads)
    for name, gradient in wanted_grads.items():
        relative = np.linalg.norm(grads[name] - gradient) / np.linalg.norm(gradient)
        assert relative <= 1e-5, (name, relative)


@pytest.mark.parametrize("cutting", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_size": 100}])
def test_micro_batch_size_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, cutting: dict[str, Any]
) -> None:
    (found,) = launch(1, gradients, tiny("qwen2"), make_groups(), cutting)
    check(found, reference("qwen2", False, "token-mean"))


@pytest.mark.parametrize("cutting", [{"tp": 2}, {"dp": 2}, {"dp": 2, "micro_batch_size": 1}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)])
def test_layout_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, kind: str, tied: bool, cutting: dict[str, Any]
) -> None:
    size = cutting.get("tp", 1) * cutting.get("dp", 1)
    found = launch(size, gradients, tiny(kind, tied), make_groups(), cutting)
    check(found[0], reference(kind, tied, "token-mean"))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_order_of_groups_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, reference: Any, aggregation: str
) -> None:
    groups = [group.take(pa.array([2, 0, 1])) for group in make_groups()]
    random.Random(5).shuffle(groups)
    settings = {"aggregation": aggregation, "max_response_tokens": 32, "dp": 2, "micro_batch_size": 2}
    found = launch(2, gradients, tiny("qwen2"), groups, settings)
    check(found[0], reference("qwen2", False, aggregation))
