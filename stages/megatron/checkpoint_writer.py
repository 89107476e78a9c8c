"""Writes checkpoints while training goes on.

    save     all tensors are copied to host memory; training goes on from here
             in a thread:  folder -> common.pt (rank 0) -> tensors (all ranks) -> metadata.json (rank 0)
    finish   waits for the thread

After each of the thread's steps the ranks tell one another whether it worked: an error of one, such as a full disk, is
raised on all. A rank that failed alone would leave the others waiting for it. They do so in a process group of their
own: the collectives of training go on meanwhile.

Megatron has a writer too, which forks a process for each file and starts a manager process that runs the main module
again; neither is safe in a process with threads, as an actor's is.
"""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.utils import _DistWrapper

from rollstream.stages.errors import CheckpointError
from rollstream.stages.megatron import parallel
from rollstream.stages.megatron.checkpoint import one_error_for_all, state_of
from rollstream.stages.megatron.mcore import (
    COMMON_STATE_FNAME,
    CheckpointingConfig,
    ShardedTensor,
    is_main_replica,
    nested_values,
    save_config,
    save_preprocess,
)
from rollstream.stages.megatron.mcore import torch_strategies as strategies
from rollstream.stages.megatron.trainer import Trainer

FORMAT = CheckpointingConfig("torch_dist", 1)
#: No rank waits longer for the files of another.
WRITE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class _Copy:
    """A checkpoint in host memory."""

    tensors: Any  # this rank's, as torch's writer takes them
    common: bytes  # what all ranks hold alike; small


class CheckpointWriter:
    """The checkpoints of one rank. Making one is collective; it makes a process group."""

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._checked = False

    def save(self, trainer: Trainer, folder: Path) -> None:
        """Copies what `folder`, which must be empty, will hold and begins to write it; collective.

        Training may go on at once. Waits for the save before, whose error it raises.
        """
        self.finish()
        copies: list[_Copy] = []
        with one_error_for_all("copied for", folder):  # a rank that could not copy must not be waited for
            _DistWrapper(self._group, True, 0).all_gather("copy", lambda: copies.append(self._copy(trainer)))
        self._checked = True
        self._writing = self._thread.submit(self._write, copies[0], folder)

    def finish(self) -> None:
        """Waits until what `save` began is written on all ranks; does nothing where that is known already.

        Raises CheckpointError on every rank if one could not write. The trainer is as it was, and can save again.
        """
        writing = self._writing
        if writing is None:
            return
        try:
            writing.result(timeout=WRITE_TIMEOUT.total_seconds())
        except TimeoutError:
            raise CheckpointError(f"the policy was not written within {WRITE_TIMEOUT}") from None
        finally:
            if writing.done() and self._writing is writing:
                self._writing = None

    def close(self) -> None:
        """Waits for what is being written."""
        try:
            self.finish()
        finally:
            self._thread.shutdown(wait=False)  # it has been waited for, as long as a write may take

    def _copy(self, trainer: Trainer) -> _Copy:
        # Whether the ranks' parts make a whole depends on the layout alone: once is enough.
        sharded: Any
        sharded, common = save_preprocess(state_of(trainer), validate_access_integrity=not self._checked)
        for entry in nested_values(sharded):
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
                entry.data = self._on_host(entry)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded, True)
        content = io.BytesIO()
        torch.save(common, content)
        return _Copy(strategies.mcore_to_pyt_state_dict(by_key, False), content.getvalue())

    def _on_host(self, entry: Any) -> Tensor:
        """A copy in memory that is used for every save: to allocate pinned memory takes longer than to fill it."""
        key = (entry.key, entry.global_offset)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(
                entry.data.shape, dtype=entry.data.dtype, device="cpu", pin_memory=torch.cuda.is_available()
            )
        return self._buffers[key].copy_(entry.data, non_blocking=True)

    def _write(self, copy: _Copy, folder: Path) -> None:
        ranks, first = _DistWrapper(self._group, True, 0), parallel.is_first()
        with one_error_for_all("saved to", folder):
            ranks.all_gather("folder", lambda: folder.mkdir(parents=True, exist_ok=True))
            ranks.all_gather("common", lambda: (folder / COMMON_STATE_FNAME).write_bytes(copy.common) if first else 0)
            save_tensors(
                copy.tensors,
                storage_writer=FileSystemWriter(folder),
                planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )
            ranks.all_gather("metadata", lambda: save_config(FORMAT, str(folder)) if first else None)
