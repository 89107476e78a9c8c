"""The metrics of one step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.graphs.joiner import Joined
from rollstream.stages.base import Metric, Metrics


def step_metrics(ranks: Iterable[Mapping[str, Metric]], groups: Sequence[Joined]) -> dict[str, float]:
    """What the update stage's ranks measured, and what was measured on the way of the step's groups. A group that came
    on several streams brings what they have in common once."""
    sums = Metrics()
    for rank in ranks:
        sums.merge(rank)
    for group in groups:
        first, *others = (item.metrics for item in group.items)
        sums.merge(first)
        for other in others:
            sums.merge({name: metric for name, metric in other.items() if name not in first})
    return sums.means() | {"step/groups": float(len(groups)), "step/tokens": sums.sums.get("actor/tokens", (0,))[0]}


@dataclass
class Clock:
    """When the parts of a step ended, by time.monotonic."""

    begun: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    updated: float = 0.0

    def metrics(self, num_tokens: float) -> dict[str, float]:
        """Seconds of a step that ends now, its weights being out: all, the wait for its groups, its update, the
        weights."""
        now = time.monotonic()
        return {
            "time/step_s": now - self.begun,
            "time/wait_s": self.waited - self.begun,
            "time/update_s": self.updated - self.waited,
            "time/weights_s": now - self.updated,
            "time/tokens_per_s": num_tokens / (now - self.begun),
        }
