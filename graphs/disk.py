"""Record batches on disk: written without a copy, whole or not at all, and read as views of the mapped file.

    batch -> stream_of -> [schema | batch | end] -> write_whole     -> file -> map_file -> read_batch -> the same batch
                                                    WornFile.write

A batch is kept as an Arrow IPC stream of its own, so that every record can be read alone, with its schema and the
schema's metadata.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

#: Where a file's bytes are replaced on the blocks that they have, so that no write over them can find the disk full.
IN_PLACE = frozenset({"ext2", "ext3", "ext4", "tmpfs"})
#: The file systems of this process, one a line (proc(5)).
MOUNTS = Path("/proc/self/mountinfo")
#: Buffers that one system call takes at most (IOV_MAX).
MAX_BUFFERS_A_CALL = 1024


class _Gather(io.RawIOBase):
    """A sink that keeps the buffers it is given instead of copying them anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Any] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.buffers.append(data)
        return len(data)


def stream_of(batch: pa.RecordBatch, metadata: Mapping[str, str] | None = None) -> list[Any]:
    """The batch as the pieces of one IPC stream; the big ones are the batch's own buffers. `metadata` goes with the
    batch, apart from the schema's. A slice is written as its own rows only."""
    sink = _Gather()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    return sink.buffers


def write_whole(fd: int, pieces: Sequence[Any], offset: int) -> int:
    """Writes the pieces one after another from `offset` on; gives the number of bytes.

    The kernel has them all when this returns. Raises OSError (the disk is full), and then the file has its old size
    again: what was written past its end would hold the space that others wait for, and look like a record.
    """
    old_size = os.fstat(fd).st_size
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    end = offset
    try:
        while left:
            written = os.pwritev(fd, left[:MAX_BUFFERS_A_CALL], end)
            end += written
            num_done = 0
            while num_done < len(left) and written >= len(left[num_done]):
                written -= len(left[num_done])
                num_done += 1
            del left[:num_done]
            if written:
                left[0] = left[0][written:]
    except BaseException:
        os.ftruncate(fd, old_size)
        raise
    return end - offset


class WornFile:
    """A file that is written over again and again.

    What it holds already is written over through one mapping that stays, at twice the speed of a system call; what
    lies past its end, and all of it where the file system does not replace bytes in place, by `write_whole`: a mapping
    has no way to say that the disk is full (the process gets a SIGBUS).
    """

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._mapped = replaces_in_place(path)
        self._map: mmap.mmap | None = None

    def write(self, pieces: Sequence[Any], offset: int) -> int:
        """As `write_whole`. Nothing before `offset` may be unwritten."""
        parts = [np.frombuffer(piece, np.uint8) for piece in pieces if len(piece)]
        end = offset + sum(len(part) for part in parts)
        size = os.fstat(self._fd).st_size
        if not self._mapped or end > size:
            return write_whole(self._fd, pieces, offset)
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self._fd, size)
        whole, at = np.frombuffer(self._map, np.uint8), offset
        for part in parts:
            whole[at : at + len(part)] = part
            at += len(part)
        return end - offset

    def close(self) -> None:
        self._map = None
        os.close(self._fd)


def replaces_in_place(path: Path) -> bool:
    """Whether the file system that this file lies in is known to replace bytes where they lie."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == name:
            return rest.split()[0] in IN_PLACE
    return False


def map_file(path: Path) -> pa.Buffer:
    """The file's bytes as they are on disk, mapped, not read."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def read_batch(stream: pa.Buffer) -> pa.RecordBatch:
    """The batch of a stream that `stream_of` made, as views of it."""
    return pa.ipc.open_stream(stream).read_next_batch()
