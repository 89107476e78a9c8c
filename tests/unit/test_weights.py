from __future__ import annotations

import numpy as np
import pytest

from rollstream.graphs import weights
from rollstream.graphs.weights import Weights, bucketed
from rollstream.stages.errors import WiringError


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(weights, "BUCKET_BYTES", 8)


def names(sizes: list[int]) -> list[list[str]]:
    """Buckets of tensors named by position, `sizes` in bytes."""
    tensors = ((str(i), np.zeros(size, np.uint8)) for i, size in enumerate(sizes))
    return [[name for name, _ in bucket] for bucket in bucketed(tensors)]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([], []),
        ([4, 4, 4], [["0", "1"], ["2"]]),
        ([5, 4, 4], [["0"], ["1", "2"]]),
        ([20, 1], [["0"], ["1"]]),
        ([1, 20, 1], [["0"], ["1"], ["2"]]),
        ([0, 0], [["0", "1"]]),
    ],
)
def test_tensors_keep_their_order_in_buckets_of_bounded_bytes(sizes, buckets):
    assert names(sizes) == buckets


def test_tensors_are_passed_on_as_they_are():
    array = np.arange(3, dtype=np.float16)
    (((name, same),),) = bucketed([("w", array)])
    assert (name, same is array) == ("w", True)


def test_admission_is_a_step_more_with_each_version():
    admitted = Weights.admitted
    one_behind = type("OneBehind", (), {"max_staleness": 1})()
    assert [admitted(one_behind, version, 4) for version in range(3)] == [8, 12, 16]


def test_the_ends_must_be_streams():
    with pytest.raises(WiringError, match=r"Weights' source must be a stream .*got int"):
        Weights(1, to="rollouts")  # type: ignore[arg-type]
