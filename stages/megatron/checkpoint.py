"""All that a resumed run needs, in Megatron's distributed checkpoint format.

Every rank writes what it alone holds; tensors are stored by their names and places in the whole model, not by rank, so
that any layout can load them. `checkpoint_writer` writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rollstream.stages.errors import CheckpointError
from rollstream.stages.megatron import optimizer_state
from rollstream.stages.megatron.mcore import (
    COMMON_STATE_FNAME,
    ShardedObject,
    dist_checkpointing,
    get_cuda_rng_tracker,
)
from rollstream.stages.megatron.model import Model
from rollstream.stages.megatron.trainer import Trainer

#: Characters of an error of one rank: Megatron's may list all tensors.
MAX_CAUSE = 500


def load(trainer: Trainer, folder: Path) -> None:
    """Restores what a CheckpointWriter wrote; collective. On the layout that wrote it, training goes on bit for bit.

    Another layout gets the same weights, optimizer and schedule; its random states, which only dropout uses, start
    from the seed.
    """
    with one_error_for_all("loaded from", folder):
        wanted = state_of(trainer)
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
    with one_error_for_all("loaded from", folder):
        loaded = cast(dict[str, Any], dist_checkpointing.load(_model_state(chunks), str(folder)))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])


def saved_policy(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its policy: the model folder that it began with, dtype, and the settings of its
    adapters or None. Not collective; raises OSError, KeyError or UnpicklingError where it is none of ours."""
    return torch.load(folder / COMMON_STATE_FNAME, map_location="cpu", weights_only=True)["policy"]


@contextlib.contextmanager
def one_error_for_all(done: str, folder: Path) -> Generator[None]:
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


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All entries of a checkpoint, with the trainer's own tensors in them."""
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
    return {f"model{index}": chunk.sharded_state_dict(metadata={}) for index, chunk in enumerate(chunks)}


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
