"""The loss of one micro-batch of a policy update, and what to report of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollstream.stages.base import Metric, Metrics
from rollstream.stages.loss.aggregate import token_weights
from rollstream.stages.loss.correction import behaviour_log_ratio, correction_weights
from rollstream.stages.loss.kl import kl_loss
from rollstream.stages.loss.mismatch import mismatch
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
    #: Sum of the squares of the weights by which the samples are compared with the policy, where they are.
    weight_squares: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Objective:
    """sum over tokens of weight * (correction * clipped policy loss + kl_coef * KL), Shao et al. 2024 (GRPO), equation
    3, with the correction of `correction_weights`: 1 where there is none.

    The weights hold the denominators of the whole step, so that parts of it just add up. Old log-probabilities are the
    column `old_logprobs` where there is one, else the current ones, held fixed: then the ratio is exactly 1.
    """

    settings: ActorUpdate.Config
    denominators: Denominators
    #: Report how far the rollout's log-probabilities are from those before the update, which must be at hand.
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
        metrics, squares = Metrics(sums), 0.0
        if config.correction.is_on or self.compare_rollout:
            prox = logprobs.detach() if config.old_logprobs == "rollout" else old
            log_ratio = behaviour_log_ratio(prox, columns["rollout_logprobs"], mask)
            correction, cut = correction_weights(log_ratio, mask, batch.sample_index, config.correction)
            if config.correction.is_on:
                per_token = correction * per_token
            if self.compare_rollout:
                found, squares = mismatch(log_ratio, correction, cut, mask)
                metrics.merge(found)
        if config.kl_coef:
            per_token = per_token + config.kl_coef * kl_loss(logprobs, columns["ref_logprobs"], mask, config.kl)
        loss = (self._weights(batch) * per_token).sum()
        metrics.merge(_observed(logprobs.detach(), entropies, batch))
        return loss, Report(loss=float(loss.detach()), sums=metrics.take(), weight_squares=squares)

    def _weights(self, batch: MicroBatch) -> Tensor:
        return token_weights(
            batch.columns["loss_mask"],
            batch.sample_index,
            self.settings.aggregation,
            num_tokens=self.denominators.num_tokens,
            num_samples=self.denominators.num_samples,
            max_tokens=self.settings.max_response_tokens or 1,
        )


def _observed(logprobs: Tensor, entropies: Tensor, batch: MicroBatch) -> dict[str, Metric]:
    columns, mask = batch.columns, batch.columns["loss_mask"]
    per_token = {"actor/entropy": entropies}
    if "ref_logprobs" in columns:
        per_token["ref/kl"] = kl_loss(logprobs, columns["ref_logprobs"], mask, "k3")
    return masked_sums(per_token, mask)


def masked_sums(per_token: dict[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """(sum over the tokens with mask true, their number) of each, brought to the host in one transfer."""
    rows = torch.stack([torch.where(mask, values, 0.0).double().sum() for values in per_token.values()])
    count = int(mask.sum())
    return {name: (total, count) for name, total in zip(per_token, rows.tolist(), strict=True)}
