"""One update of a policy: the optimizer steps on a rank's share of a batch, in step with the other ranks.

groups -> samples -> mini_batches parts -> micro-batches, as many on each data-parallel rank
log-probabilities before the update, of the policy and of the reference, where they are needed
for each epoch, for each part:
    denominators, over all ranks -> gradients -> gate -> optimizer step, or skip
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from rollstream.stages.base import Metric, Metrics
from rollstream.stages.megatron import cpu_platform, lora, parallel
from rollstream.stages.megatron.batch import MicroBatch, Sample, read_samples
from rollstream.stages.megatron.objective import Denominators, Objective
from rollstream.stages.megatron.router import take_metrics
from rollstream.stages.megatron.trainer import Trainer

if TYPE_CHECKING:
    from rollstream.stages.actor import ActorUpdate

logger = logging.getLogger(__name__)

COLUMNS = ("loss_mask", "advantages", "rollout_logprobs")


class PolicyUpdate:
    """Runs updates on `trainer`. `gated` is true until the first step of a fresh run has passed the mismatch gate.

    Where adapters are trained and no reference is wired, the policy with its adapters off is the reference.
    """

    def __init__(self, trainer: Trainer, settings: ActorUpdate.Config, *, has_ref: bool):
        self.trainer = trainer
        self.settings = settings
        self.columns = (*COLUMNS, "ref_logprobs") if has_ref else COLUMNS
        self.own_ref = settings.lora is not None and settings.kl_coef > 0 and not has_ref
        self.gated = settings.max_mismatch is not None

    def run(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        """One update; collective. Each quantity is reported by one rank, so that the ranks' metrics add up."""
        config, metrics = self.settings, Metrics()
        samples = read_samples(groups, self.columns)
        parts = [self._micro_batches(part, metrics) for part in _parts(samples, config.mini_batches)]
        for part in parts:
            self._add_columns(part)
        for epoch in range(config.epochs):
            for index, part in enumerate(parts):
                unchanged = epoch == 0 and (index == 0 or config.old_logprobs == "trainer")
                self._step(part, metrics, compare_rollout=unchanged)
        return metrics.take()

    def _micro_batches(self, samples: Sequence[Sample], metrics: Metrics) -> list[MicroBatch]:
        policy = self.trainer.policy
        cut = policy.cut(samples)
        if parallel.reports_for_share():
            metrics.add("actor/padding", *policy.padding(samples, cut))
            metrics.add("actor/micro_batches", len(cut))
        return policy.pack(samples, cut, self.columns)

    def _add_columns(self, batches: Sequence[MicroBatch]) -> None:
        """Log-probabilities of the policy before the update, and of the reference that it is itself."""
        policy, config = self.trainer.policy, self.settings
        if config.old_logprobs == "rollout":
            for batch in batches:
                batch.columns["old_logprobs"] = batch.columns["rollout_logprobs"]
        elif config.mini_batches * config.epochs > 1:  # the policy will have moved by the time of the later steps
            for batch, scores in zip(batches, policy.score(batches), strict=True):
                batch.columns["old_logprobs"] = scores
        if self.own_ref:
            with lora.adapters_off(policy.chunks):
                for batch, scores in zip(batches, policy.score(batches), strict=True):
                    batch.columns["ref_logprobs"] = scores

    def _step(self, batches: Sequence[MicroBatch], metrics: Metrics, *, compare_rollout: bool) -> None:
        denominators = _denominators(batches)
        if parallel.is_first():
            metrics.add("actor/tokens", denominators.num_tokens)
            metrics.add("actor/lr", self.trainer.lr)
        if denominators.num_tokens == 0:
            return self._skip(metrics, "no token of this batch is trained on")
        compare_rollout = compare_rollout or self.gated  # while it is, no weight has changed
        objective = Objective(settings=self.settings, denominators=denominators, compare_rollout=compare_rollout)
        reports = self.trainer.forward_backward(batches, objective)
        seen = Metrics()
        for report in reports:
            seen.merge(report.sums)
        loss, squares, difference, weight = parallel.sum_of_reports(
            sum(report.loss for report in reports),
            sum(report.weight_squares for report in reports),
            *(seen.sums.get(f"rollout/{name}", (0.0, 0.0))[0] for name in ("logprob_diff", "weight")),
        )
        if parallel.reports_for_share():
            metrics.merge(seen.sums)
        if parallel.is_first() and compare_rollout:
            metrics.add("rollout/ess", weight**2 / squares if squares else 0.0, denominators.num_tokens)
        metrics.merge(take_metrics(self.trainer.policy.chunks))
        if self.gated:
            self._check_mismatch(difference / denominators.num_tokens)
        norm = self.trainer.step() if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            return self._skip(metrics, f"loss {loss}, gradient norm {norm}")
        if parallel.is_first():
            metrics.add("actor/loss", loss)
            metrics.add("actor/grad_norm", norm)
            metrics.add("actor/skipped_steps", 0.0)
            if self.settings.dtype == "float16":
                metrics.add("actor/loss_scale", self.trainer.loss_scale)

    def _skip(self, metrics: Metrics, reason: str) -> None:
        if parallel.is_first():
            metrics.add("actor/skipped_steps", 1.0)
            logger.warning("optimizer step skipped, weights unchanged: %s", reason)

    def _check_mismatch(self, difference: float) -> None:
        """The gate: raises RuntimeError, before any weight has changed, if engine and trainer disagree."""
        limit = self.settings.max_mismatch
        assert limit is not None
        if not difference <= limit:  # NaN is over the limit too
            raise RuntimeError(
                f"rollout and trainer disagree before the first step: mean |trainer - rollout| log-probability of the "
                f"trained tokens is {difference:.4g}, the limit is max_mismatch={limit}. The weights are unchanged. "
                "Both must have the same weights, temperature and token ids; a rollout in a lower precision needs a "
                "higher limit, and samples that other weights made, such as those of a recording, need "
                "max_mismatch=None"
            )
        self.gated = False


def _parts(samples: Sequence[Sample], count: int) -> list[Sequence[Sample]]:
    """`count` consecutive parts of nearly equal size."""
    return [samples[len(samples) * i // count : len(samples) * (i + 1) // count] for i in range(count)]


def _denominators(batches: Sequence[MicroBatch]) -> Denominators:
    tokens = sum(int(batch.columns["loss_mask"].sum()) for batch in batches)
    samples = sum(len(batch.lengths) for batch in batches)
    counts = torch.tensor([tokens, samples], dtype=torch.int64, device=cpu_platform.device())
    num_tokens, num_samples = parallel.sum_over_shares(counts).tolist()
    return Denominators(num_tokens=num_tokens, num_samples=num_samples)
