"""The loss of one micro-batch of a policy update, and what to report of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollstream.stages.base import Metric, Metrics
from rollstream.stages.loss.aggregate import token_weights
from rollstream.stages.loss.kl import kl_loss
from rollstream.stages.loss.ppo_clip import ppo_clip
from rollstream.stages.megatron.batch import MicroBatch

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over one whole optimizer step: all micro-batches of all data-parallel ranks."""

    num_tokens: int
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of one micro-batch: its part of the loss, and sums over its trained tokens."""

    loss: float
    sums: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """sum over tokens of weight * (clipped policy loss + kl_coef * KL), Shao et al. 2024 (GRPO), equation 3.

    The weights hold the denominators of the whole step, so that parts of it just add up. Old log-probabilities are the
    column `old_logprobs` where there is one, else the current ones, held fixed: then the ratio is exactly 1.
    """

    settings: ActorUpdate.Config
    denominators: Denominators
    #: Report how far the rollout's log-probabilities are from the old ones, which must be the unchanged policy's.
    compare_rollout: bool

    def __call__(self, logprobs: Tensor, entropies: Tensor, batch: MicroBatch) -> tuple[Tensor, Report]:
        config, columns, mask = self.settings, batch.columns, batch.columns["loss_mask"]
        old = columns.get("old_logprobs", logprobs.detach())
        per_token, sums = ppo_clip(
            logprobs,
            old,
            columns["advantages"],
            mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        if config.kl_coef:
            per_token = per_token + config.kl_coef * kl_loss(logprobs, columns["ref_logprobs"], mask, config.kl)
        weights = token_weights(
            mask,
            batch.sample_index,
            config.aggregation,
            num_tokens=self.denominators.num_tokens,
            num_samples=self.denominators.num_samples,
            max_tokens=config.max_response_tokens or 1,
        )
        loss = (weights * per_token).sum()
        metrics = Metrics(sums)
        metrics.merge(self._observed(logprobs.detach(), entropies, batch))
        return loss, Report(loss=float(loss.detach()), sums=metrics.take())

    def _observed(self, logprobs: Tensor, entropies: Tensor, batch: MicroBatch) -> dict[str, Metric]:
        columns, mask = batch.columns, batch.columns["loss_mask"]
        per_token = {"actor/entropy": entropies}
        if "ref_logprobs" in columns:
            per_token["ref/kl"] = kl_loss(logprobs, columns["ref_logprobs"], mask, "k3")
        if self.compare_rollout:
            unchanged = logprobs if self.settings.old_logprobs == "rollout" else columns.get("old_logprobs", logprobs)
            difference = columns["rollout_logprobs"] - unchanged
            per_token |= {"rollout/logprob_diff": difference.abs(), "rollout/mismatch_kl": difference}
        return masked_sums(per_token, mask)


def masked_sums(per_token: dict[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """(sum over the tokens with mask true, their number) of each, brought to the host in one transfer."""
    rows = torch.stack([torch.where(mask, values, 0.0).double().sum() for values in per_token.values()])
    count = int(mask.sum())
    return {name: (total, count) for name, total in zip(per_token, rows.tolist(), strict=True)}
