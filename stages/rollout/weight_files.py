"""Weights as files in shared memory, for processes that cannot be handed arrays."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

#: Of the tensors in one file.
FILE_BYTES = 256 * 1024 * 1024
SHARED_MEMORY = "/dev/shm"


def make_folder(parent: str | None = None) -> Path:
    """A new folder in shared memory, or among temporary files where there is none. Folders that processes left which
    were killed are removed: each has the id of its process in its name."""
    chosen = parent or (SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir())
    for left in Path(chosen).glob("rollstream-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"rollstream-{os.getpid()}-", dir=chosen))


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
