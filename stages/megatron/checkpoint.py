"""All that a resumed run needs, in Megatron's distributed checkpoint format.

Every rank writes what it alone holds. The optimizer is stored by parameter, not by rank ("fully_reshardable").

    save    folder -> common.pt (rank 0) -> tensors (all ranks) -> metadata.json (rank 0)

After each of these the ranks tell one another whether it worked: an error of one, such as a full disk, is raised on
all. A rank that failed alone would leave the others waiting for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.utils import _DistWrapper

from rollstream.stages.errors import CheckpointError
from rollstream.stages.megatron import optimizer_state, parallel
from rollstream.stages.megatron.mcore import (
    COMMON_STATE_FNAME,
    CheckpointingConfig,
    ShardedObject,
    dist_checkpointing,
    get_cuda_rng_tracker,
    save_config,
    save_preprocess,
)
from rollstream.stages.megatron.mcore import torch_strategies as strategies
from rollstream.stages.megatron.model import Model
from rollstream.stages.megatron.trainer import Trainer

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
FORMAT = CheckpointingConfig("torch_dist", 1)
#: Characters of an error of one rank: Megatron's may list all tensors.
MAX_CAUSE = 500


def save(trainer: Trainer, folder: Path) -> None:
    """Writes weights, optimizer, schedule and random states into `folder`, which must be empty; collective.

    Raises CheckpointError on every rank if one could not write. The trainer is as it was, and can save again.
    """
    ranks = _DistWrapper(None, True, 0)
    first = parallel.is_first()
    with _one_error_for_all("saved to", folder):
        ranks.all_gather("folder", lambda: folder.mkdir(parents=True, exist_ok=True))
        sharded, common = save_preprocess(_state(trainer) | {"content_metadata": METADATA})
        ranks.all_gather("common", lambda: _save_common(common, folder) if first else None)
        _save_tensors(sharded, folder)
        ranks.all_gather("metadata", lambda: save_config(FORMAT, str(folder)) if first else None)


def load(trainer: Trainer, folder: Path) -> None:
    """Restores what `save` wrote; collective. On the layout that wrote it, training goes on bit for bit.

    Another layout gets the same weights, optimizer and schedule; its random states, which only dropout uses, start
    from the seed.
    """
    with _one_error_for_all("loaded from", folder):
        wanted = _state(trainer)
        common = dist_checkpointing.load_common_state_dict(str(folder))
        if common["layout"] != wanted.pop("layout"):
            del wanted["random"]
        loaded = cast(dict[str, Any], dist_checkpointing.load(wanted, str(folder)))
    for index, chunk in enumerate(trainer.policy.chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    optimizer_state.set_progress(trainer.optimizer, loaded["progress"])
    trainer.scheduler.num_steps = 0  # Megatron adds those of the checkpoint
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    if "random" in wanted:
        _set_random_states(loaded["random"])


def load_weights(chunks: Sequence[Model], folder: Path) -> None:
    """Fills the chunks with the weights of a checkpoint, of any layout; collective."""
    with _one_error_for_all("loaded from", folder):
        loaded = cast(dict[str, Any], dist_checkpointing.load(_model_state(chunks), str(folder)))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])


def saved_policy(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its policy: the model folder that it began with, dtype, and the settings of its
    adapters or None. Not collective; raises OSError, KeyError or UnpicklingError where it is none of ours."""
    return torch.load(folder / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)["policy"]


@contextlib.contextmanager
def _one_error_for_all(done: str, folder: Path) -> Generator[None]:
    """Torch's error for all ranks is no Exception, and would end an actor. It may be as dark as "unexpected pos 704 vs
    598" where the disk is full: the room is told too."""
    try:
        yield
    except CheckpointException as error:
        causes = [
            f"rank {rank}: {type(cause).__name__}: {str(cause)[:MAX_CAUSE]}"
            for rank, (cause, _) in error.failures.items()
        ]
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
        raise CheckpointError(
            f"the policy can't be {done} {folder} ({free / 2**20:.1f} MiB free):\n  " + "\n  ".join(causes)
        ) from error


def _save_common(common: Any, folder: Path) -> None:
    """What all ranks hold alike; small. Torch's own writing to a path does not tell that a disk is full."""
    content = io.BytesIO()
    torch.save(common, content)
    (folder / COMMON_STATE_FNAME).write_bytes(content.getvalue())


def _save_tensors(sharded: Any, folder: Path) -> None:
    """Megatron's format, written by this process.

    Megatron's own writer forks a process for each file and starts a manager process that runs the main module again;
    neither is safe in a process with threads, as an actor's is.
    """
    tensors, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(sharded, True)
    save_tensors(
        strategies.mcore_to_pyt_state_dict(tensors, False),
        storage_writer=FileSystemWriter(folder),
        planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _state(trainer: Trainer) -> dict[str, Any]:
    model, settings = _model_state(trainer.policy.chunks), trainer.settings
    adapters = dataclasses.asdict(settings.lora) if settings.lora is not None else None
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        **model,
        "optimizer": optimizer_state.sharded_tensors(trainer.optimizer, model),
        "progress": optimizer_state.progress(trainer.optimizer),
        "scheduler": trainer.scheduler.state_dict(),
        "random": ShardedObject("random", _random_states(), (size,), (rank,)),
        "layout": dataclasses.asdict(settings.layout),
        "policy": {"model": settings.model, "dtype": settings.dtype, "lora": adapters},
    }


def _model_state(chunks: Sequence[Model]) -> dict[str, Any]:
    return {f"model{index}": chunk.sharded_state_dict(metadata=METADATA) for index, chunk in enumerate(chunks)}


def _random_states() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": _tracker().get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["cpu"])
    _tracker().set_states(states["tracker"])


def _tracker() -> Any:
    """Megatron's random states by name."""
    return get_cuda_rng_tracker()
