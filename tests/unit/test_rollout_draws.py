from __future__ import annotations

import subprocess
import sys

import numpy as np

from rollstream.stages.rollout.draws import uniforms


def test_numbers_lie_strictly_between_zero_and_one():
    numbers = uniforms(0, [f"g.{i}" for i in range(50)], 100)
    assert numbers.shape == (50, 100)
    assert 0 < numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1


def test_a_number_does_not_depend_on_the_batch_or_the_length():
    assert np.array_equal(uniforms(3, ["a", "b", "c"], 9)[1, :4], uniforms(3, ["b"], 4)[0])


def test_seed_and_sample_change_the_numbers():
    first, other = uniforms(0, ["a", "b"], 8)
    assert not np.intersect1d(first, other).size
    assert not np.intersect1d(first, uniforms(1, ["a"], 8)).size


def test_numbers_are_the_same_in_another_process():
    code = "from rollstream.stages.rollout.draws import uniforms; print(uniforms(7, ['r000012.e0.3'], 5).tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == str(uniforms(7, ["r000012.e0.3"], 5).tolist())


def test_numbers_are_uniform():
    counts, _ = np.histogram(uniforms(0, [f"g.{i}" for i in range(100)], 200), bins=20, range=(0, 1))
    chi_square = ((counts - 1000.0) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 99.9 % quantile at 19 degrees of freedom
