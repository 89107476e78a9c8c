"""How a policy update makes up for samples that another policy drew. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollstream.stages.errors import check_rules
from rollstream.stages.names import known_names

#: Bounds (low, high) of each kind, where none are given.
DEFAULT_BOUNDS: dict[str, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "mask": (0.5, 5.0),
    "seq-tis": (0.0, 2.0),
    "seq-mask": (0.999, 1.002),
}


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights of tokens by r, the ratio of their probability by the trainer before the update to that by the rollout:

        none       1
        tis        r of the token, truncated to [low, high]
        mask       r of the token, 0 outside of [low, high]
        seq-tis    product of r over the sample, truncated to [low, high]
        seq-mask   r of the token, 0 where the geometric mean of r over the sample is outside of [low, high]

    r differs from 1 where the rollout had older weights, and where engine and trainer compute differently. "tis" uses
    every token; "mask" leaves out those that the two disagree on. The product of "seq-tis" has no bias that the
    truncation does not bring, but it drifts with the length of a sample: it suits short responses. The bounds of
    "seq-mask" are of a mean over many tokens, and so are close to 1. `correction.correction_weights` gives the sources.

    >>> Correction(kind="tis").bounds, Correction(kind="mask", high=2.0).bounds
    ((0.0, 2.0), (0.5, 2.0))
    """

    #: What a token's weight is: none, tis, mask, seq-tis or seq-mask.
    kind: str = "none"
    #: Smallest ratio that is not cut; None takes the kind's own: 0 for tis and seq-tis, 0.5 for mask, 0.999 for
    #: seq-mask.
    low: float | None = None
    #: Largest ratio that is not cut; None takes the kind's own: 2 for tis and seq-tis, 5 for mask, 1.002 for seq-mask.
    high: float | None = None

    def __post_init__(self) -> None:
        check_rules(_rules(self))

    @property
    def is_on(self) -> bool:
        return self.kind != "none"

    @property
    def per_sample(self) -> bool:
        """Whether all tokens of a sample are judged together."""
        return self.kind.startswith("seq-")

    @property
    def rejects(self) -> bool:
        """Whether what lies outside of the bounds gets weight 0, not the nearest bound."""
        return self.kind.endswith("mask")

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = DEFAULT_BOUNDS[self.kind]
        return low if self.low is None else self.low, high if self.high is None else self.high


def _rules(c: Correction) -> list[tuple[bool, str]]:
    if c.kind not in DEFAULT_BOUNDS:
        known = known_names(str(c.kind), DEFAULT_BOUNDS)
        return [(False, f"correction kind must be one of the known, got {c.kind!r}: {known}")]
    if not c.is_on:
        return [(c.low is None and c.high is None, f"correction kind 'none' takes no bounds, got {c.low} and {c.high}")]
    low, high = c.bounds
    return [
        (0 <= low <= 1, f"correction low must be from 0 to 1, the ratio of equal policies, got {low}"),
        (1 <= high < math.inf, f"correction high must be at least 1, the ratio of equal policies, got {high}"),
        (not low >= high, f"correction low must be below high={high}, got {low}"),
    ]
