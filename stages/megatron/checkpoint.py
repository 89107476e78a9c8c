"""All that a resumed run needs, in Megatron's distributed checkpoint format.

Every rank writes what it alone holds. The optimizer is stored by parameter, not by rank ("fully_reshardable").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from rollstream.stages.megatron.mcore import ShardedObject, dist_checkpointing, get_cuda_rng_tracker, state
from rollstream.stages.megatron.mcore import torch_strategies as strategies
from rollstream.stages.megatron.trainer import Trainer

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(trainer: Trainer, folder: Path) -> None:
    """Writes weights, optimizer, schedule and random states into `folder`, which must be empty; collective."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(
        _state(trainer, loading=False),
        str(folder),
        sharded_strategy=_InProcessStrategy("torch_dist", 1),
        content_metadata=METADATA,
    )


def load(trainer: Trainer, folder: Path) -> None:
    """Restores what `save` wrote; collective. On the layout that wrote it, training goes on bit for bit."""
    loaded = cast(dict[str, Any], dist_checkpointing.load(_state(trainer, loading=True), str(folder)))
    trainer.policy.model.load_state_dict(loaded["model"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    _set_random_states(loaded["random"])


def _state(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    model = trainer.policy.model.sharded_state_dict(metadata=METADATA)
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA),
        "scheduler": trainer.scheduler.state_dict(),
        "random": ShardedObject(
            "random",
            _random_states(),
            (state.get_tensor_model_parallel_world_size(),),
            (state.get_tensor_model_parallel_rank(),),
            replica_id=state.get_data_parallel_rank(),
        ),
    }


def _random_states() -> dict[str, Any]:
    """Of one model copy; the copies draw alike."""
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


class _InProcessStrategy(strategies.TorchDistSaveShardedStrategy):
    """Megatron's format, written by this process.

    Megatron's own writer forks a process for each file and starts a manager process that runs the main module again;
    neither is safe in a process with threads, as an actor's is.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        tensors, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_tensors(
            strategies.mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
