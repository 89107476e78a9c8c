from __future__ import annotations

import math

import pytest

from rollstream.stages.base import LARGEST, SMALLEST, Metrics


def merged(*parts: dict) -> Metrics:
    metrics = Metrics()
    for part in parts:
        metrics.merge(part)
    return metrics


def test_means_are_of_all_that_was_counted():
    assert merged({"a": (6.0, 3.0)}, {"a": (2.0, 1.0)}, {"b": (0.0, 0.0)}).means() == {"a": 2.0}


def test_extremes_are_merged_as_such():
    metrics = merged(*({"max": (v, LARGEST), "min": (v, SMALLEST)} for v in (2.0, -1.0, 7.0, 3.0)))
    assert metrics.means() == {"max": 7.0, "min": -1.0}
    assert metrics.take() == {"max": (7.0, LARGEST), "min": (-1.0, SMALLEST)}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
@pytest.mark.parametrize("kind", [LARGEST, SMALLEST])
def test_nan_is_never_hidden(values, kind):
    assert math.isnan(merged(*({"x": (v, kind)} for v in values)).means()["x"])


@pytest.mark.parametrize("kinds", [(1.0, LARGEST), (LARGEST, 1.0), (LARGEST, SMALLEST)])
def test_a_name_is_of_one_kind(kinds):
    with pytest.raises(AssertionError, match="x is of two kinds"):
        merged(*({"x": (1.0, kind)} for kind in kinds))
