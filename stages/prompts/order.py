"""The order of an epoch."""

from __future__ import annotations

import numpy as np


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Indices 0 .. num_rows-1 in the order of `epoch`, int64 [num_rows]; each epoch has an order of its own.

    Rows are sorted by raw Philox output, which NumPy keeps the same in all versions; it does not promise that for
    `Generator.permutation`.
    """
    if not shuffle:
        return np.arange(num_rows)
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")
