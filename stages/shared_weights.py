"""Weights that stay where they are: one buffer, in a GPU's memory or in the machine's, that other processes read.

    share_weights(version)          the update stage copies its weights into the buffer, always the same one
    load_shared_weights(weights)    a rollout stage copies them out

Nobody waits for readers: the next version overwrites the one before. Whoever reads asks `are_there` afterwards, and
where they are gone, takes newer ones. Nothing here loads torch.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Which version is in the buffer; NONE while it changes.
STAMP, NONE = "version", -1
#: The buffer itself, where it is a file.
BUFFER = "weights"


@dataclass(frozen=True)
class SharedTensor:
    """Where one tensor, in Hugging Face form and contiguous, is in the buffer."""

    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    start: int  # byte
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class SharedWeights:
    """One version of the weights, as long as no other has taken its place."""

    version: int
    #: In shared memory of the machine: the stamp, and the buffer where it is a file.
    folder: str
    num_bytes: int
    tensors: tuple[SharedTensor, ...]
    #: CUDA's handle of the buffer, as torch makes it; None where it is a file.
    handle: tuple[Any, ...] | None

    def are_there(self) -> bool:
        """False once another version has come, or begun to come, or their process has ended."""
        with suppress(FileNotFoundError):
            return read_stamp(Path(self.folder)) == self.version
        return False


def read_stamp(folder: Path) -> int:
    data = (folder / STAMP).read_bytes()
    return struct.unpack("<q", data)[0] if len(data) == 8 else NONE


def write_stamp(folder: Path, version: int) -> None:
    file = os.open(folder / STAMP, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, struct.pack("<q", version), 0)
    finally:
        os.close(file)
