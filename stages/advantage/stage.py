"""The advantage stage: from one reward a sample to one advantage a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollstream.stages.advantage.grpo import grpo
from rollstream.stages.base import MapStage
from rollstream.stages.errors import ConfigError, StageError
from rollstream.stages.names import known_names
from rollstream.stages.schema import Advantaged, Scored

#: Estimators by name.
ESTIMATORS = {"grpo": grpo}


class Advantage(MapStage[Scored, Advantaged]):
    """Compares each sample of a group with the others; tokens with loss mask false get advantage 0.

        advantaged = Advantage(Advantage.Config(scale_by_std=False))(scored)

    Metrics: `advantage/zero_variance_groups` share of groups that teach nothing because all their rewards are equal,
    `advantage/singleton_groups` share of groups with one known reward or none, each group counted under one of the two
    at most; `advantage/mean_abs` mean size of a sample's advantage.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MapStage.Config):
        """Which estimator, and its constants."""

        #: How advantages are estimated: "grpo".
        estimator: str = "grpo"
        #: Divide by the group's standard deviation; false gives the advantage of Dr. GRPO.
        scale_by_std: bool = True
        #: Added to the standard deviation, in units of the reward.
        eps: float = 1e-6

        def __post_init__(self) -> None:
            faults: list[str] = []
            if self.estimator not in ESTIMATORS:
                faults.append(
                    f"estimator is not known, got {self.estimator!r}: " + known_names(self.estimator, ESTIMATORS)
                )
            if not self.eps >= 0:
                faults.append(f"eps must be 0 or above, got {self.eps}")
            if faults:
                raise ConfigError(faults)

    config: Config

    def process(self, group: pa.RecordBatch) -> Mapping[str, pa.Array]:
        rewards = self._rewards(group)
        estimate = ESTIMATORS[self.config.estimator]
        advantages = estimate(rewards, scale_by_std=self.config.scale_by_std, eps=self.config.eps)
        self._measure(rewards, advantages)
        return {"advantages": per_token(advantages, group.column("loss_mask"))}

    def _rewards(self, group: pa.RecordBatch) -> npt.NDArray[np.float64]:
        """Rewards, NaN for null; raises StageError for one that is no number, which would spoil the whole group."""
        column = group.column("reward")
        rewards = column.to_numpy(zero_copy_only=False)
        broken = ~np.isfinite(rewards) & column.is_valid().to_numpy(zero_copy_only=False)
        if broken.any():
            row = int(broken.argmax())
            sample_id = group.column("sample_id")[row].as_py()
            raise StageError(
                self.name,
                sample_id,
                f"A reward must be a finite number, or null if it is not known; got {rewards[row]}.",
            )
        return rewards

    def _measure(self, rewards: npt.NDArray[np.float64], advantages: npt.NDArray[np.float64]) -> None:
        known = rewards[~np.isnan(rewards)]
        alone = len(known) < 2
        self.metrics.add("advantage/singleton_groups", alone)
        self.metrics.add("advantage/zero_variance_groups", not alone and known.max() == known.min())
        self.metrics.add("advantage/mean_abs", float(np.abs(advantages).sum()), len(advantages))


def per_token(advantages: npt.NDArray[np.float64], loss_mask: pa.ListArray) -> pa.ListArray:
    """list<float32>: each sample's advantage at each of its tokens, 0 where `loss_mask` is false."""
    lengths = loss_mask.value_lengths().to_numpy()
    mask = loss_mask.flatten().to_numpy(zero_copy_only=False)
    values = np.where(mask, np.repeat(advantages, lengths), 0.0).astype(np.float32)
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
