"""Random numbers that belong to a sample, not to the batch or the process that draws it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def uniforms(seed: int, sample_ids: Sequence[str], num_tokens: int) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each sample and position, [len(sample_ids), num_tokens].

    A number depends on seed, sample id and position alone: Philox is a counter-based generator (Salmon et al. 2011),
    and a digest of seed and id is its key. They have 40 bits, so that their product with a sum of probabilities in
    float64 stays below that sum.
    """
    rows = np.empty((len(sample_ids), num_tokens), np.float64)
    for row, sample_id in zip(rows, sample_ids, strict=True):
        key = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=16).digest()
        bits = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_tokens)
        row[:] = ((bits >> np.uint64(24)) + 0.5) * 2.0**-40
    return rows
