"""Weights as files in shared memory, for processes that cannot be handed arrays."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

#: Of the tensors in one file.
FILE_BYTES = 256 * 1024 * 1024
#: Tensors of one version whose bytes are checked.
NUM_CHECKED = 16


def files_of(tensors: Iterable[tuple[str, np.ndarray]], folder: Path) -> Iterable[Path]:
    """The tensors in order, in safetensors files of at most FILE_BYTES (or one tensor that is larger)."""
    from safetensors.numpy import save_file

    def written(bucket: Mapping[str, np.ndarray]) -> Path:
        path = folder / "weights.safetensors"
        save_file(dict(bucket), path)
        return path

    bucket: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if bucket and size + array.nbytes > FILE_BYTES:
            yield written(bucket)
            bucket, size = {}, 0
        bucket[name] = np.ascontiguousarray(array)
        size += array.nbytes
    if bucket:
        yield written(bucket)


def checksums(tensors: Sequence[tuple[str, np.ndarray]]) -> dict[str, int]:
    """CRC-32 of the bytes of NUM_CHECKED tensors at even distances, the first and the last among them.

    >>> checksums([("a", np.zeros(2, np.float32)), ("b", np.zeros(0, np.float32))])
    {'a': 1696784233, 'b': 0}
    """
    places = {round(i * (len(tensors) - 1) / (NUM_CHECKED - 1)) for i in range(NUM_CHECKED)} if tensors else set[int]()
    chosen = [tensors[place] for place in sorted(places)]
    return {name: zlib.crc32(array.tobytes()) for name, array in chosen}
