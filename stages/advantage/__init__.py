"""Advantage: how much better a sample is than its group. One file an estimator.

grpo    reward less the group's mean, over the group's standard deviation
stage   `Advantage`, the stage
"""

from __future__ import annotations

from rollstream.stages.advantage.stage import Advantage

__all__ = ["Advantage"]
