"""The update stage's side of shared weights: its first rank's buffer, and how the weights come into it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rollstream.stages.shared_folder import make_folder
from rollstream.stages.shared_weights import BUFFER, NONE, SharedTensor, SharedWeights, write_stamp

#: Each tensor begins at a multiple of so many bytes.
ALIGNMENT = 256


class WeightBuffer:
    """Holds the newest version, on `device`. `tensors` gives (Hugging Face name, tensor) of all weights, collectively,
    on the first rank only; their order and shapes must not change."""

    def __init__(
        self, tensors: Callable[[], Iterator[tuple[str, Tensor]]], device: torch.device, *, is_first: bool = True
    ):
        self._tensors, self._device, self._is_first = tensors, device, is_first
        self._is_laid_out = False  # on all ranks, which take part
        self._version: int | None = None
        self._held: SharedWeights | None = None
        self._folder: Path | None = None
        self._buffer: Tensor | None = None
        self._layout: tuple[SharedTensor, ...] = ()
        self._handle: tuple[object, ...] | None = None

    def put(self, version: int) -> SharedWeights | None:
        """Overwrites what was there, unless it is this version; None on all ranks but the first. Collective."""
        if version == self._version:  # readers of it need not look for a newer one
            return self._held
        self._version, self._held = version, None
        if not self._is_laid_out:
            self._lay_out()
            self._is_laid_out = True
        if not self._is_first:
            for _ in self._tensors():
                pass
            return None
        assert self._folder is not None
        assert self._buffer is not None
        write_stamp(self._folder, NONE)
        for place, (_, tensor) in zip(self._layout, self._tensors(), strict=True):
            self._buffer[place.start : place.start + place.num_bytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        write_stamp(self._folder, version)
        self._held = SharedWeights(
            version=version,
            folder=str(self._folder),
            num_bytes=len(self._buffer),
            tensors=self._layout,
            handle=self._handle,
        )
        return self._held

    def close(self) -> None:
        self._buffer = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _lay_out(self) -> None:
        layout: list[SharedTensor] = []
        end = 0
        for name, tensor in self._tensors():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + tensor.nbytes
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append(SharedTensor(name, dtype, tuple(tensor.shape), start, tensor.nbytes))
        if not self._is_first:
            return
        self._layout = tuple(layout)
        if self._device.type == "cuda":
            self._folder = make_folder()
            self._buffer = torch.empty(end, dtype=torch.uint8, device=self._device)
            # Once: readers keep it open, and the same handle serves those that come later.
            self._handle = tuple(reduce_tensor(self._buffer)[1][7:])
        else:
            self._folder, self._buffer = _file_buffer(end)


def _file_buffer(num_bytes: int) -> tuple[Path, Tensor]:
    """Memory that is a file, and its folder: in shared memory, or where that is full, as in small containers, among
    temporary files. Raises OSError where neither has room."""
    folder = make_folder()
    try:
        return folder, _allocated(folder / BUFFER, num_bytes)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if error.errno != errno.ENOSPC:
            raise
    folder = make_folder(tempfile.gettempdir())
    return folder, _allocated(folder / BUFFER, num_bytes)


def _allocated(path: Path, num_bytes: int) -> Tensor:
    """The file's room is taken at once: a write into a full file system would end the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
