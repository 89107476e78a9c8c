"""What came of one sample, and the messages that carry it from the worker to the stage."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Score:
    """What the function returned; a null value means that it abstained."""

    value: float | None
    parts: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """The function raised, returned what is no score, or ended its process."""

    #: The function's own traceback.
    text: str
    #: The data are at fault, not the function.
    is_data_error: bool = False


@dataclass(frozen=True)
class TimedOut:
    """The function did not end in time."""


Outcome = Score | Failure | TimedOut


@dataclass(frozen=True, kw_only=True)
class Job:
    """To the worker: samples to score, each a dict of the function's arguments; target and meta are JSON text."""

    samples: list[dict[str, Any]]
    batch: bool
    timeout_s: float


@dataclass(frozen=True)
class Began:
    """From the worker: the samples at these places are being scored from now on, and must be done in `limit_s`."""

    places: tuple[int, ...]
    limit_s: float


@dataclass(frozen=True)
class Done:
    """From the worker: the sample at this place is scored."""

    place: int
    outcome: Outcome


def as_score(returned: object) -> Score:
    """A number, None (abstains), or a pair of that and {part: number}.

    Raises TypeError or ValueError for anything else, and for NaN and infinity.

    >>> as_score((1, {"format": 0.5}))
    Score(value=1.0, parts={'format': 0.5})
    """
    value, parts = returned, {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        value, parts = returned
    if isinstance(value, Mapping):
        raise TypeError(
            f"a reward function returned a dict with the keys {', '.join(map(repr, value))}; return a number, or a "
            "pair (number, {part: number})"
        )
    for name in parts:
        if not isinstance(name, str):
            raise TypeError(f"names of reward parts must be text, got {name!r}")
    return Score(
        None if value is None else _finite(value, "a reward function"),
        {name: _finite(part, f"reward part {name!r}") for name, part in parts.items()},
    )


def _finite(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise TypeError(
            f"{what} must return a number, None to abstain, or a pair (number, {{part: number}}); "
            f"got {type(value).__name__} {str(value)[:80]!r}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must return a finite number, got {number}; return None to abstain")
    return number
