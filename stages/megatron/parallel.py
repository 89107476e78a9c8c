"""The processes of a stage as one torch.distributed world, with Megatron's groups on it."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from rollstream.stages.base import World
from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.mcore import model_parallel_cuda_manual_seed, state

#: No collective waits longer: a rank that died must end the others.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def init(world: World, layout: Layout, seed: int) -> None:
    """Joins the world and builds Megatron's groups; collective. Ranks of one model copy get different random streams.

    Raises RuntimeError if this process is already in a world: it can hold one at a time.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already holds a Megatron world; close the other stage or use another process")
    if world.size != layout.size:
        raise ValueError(f"tp={layout.tp} and dp={layout.dp} need {layout.size} ranks, the world has {world.size}")
    if world.threads:
        torch.set_num_threads(world.threads)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        cpu_platform.choose_device(world.rank)
        torch.cuda.set_device(cpu_platform.device())
    if world.size == 1:  # nobody to meet: take no port
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{world.address}:{world.port}",
            rank=world.rank,
            world_size=world.size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        create_gloo_process_groups=True,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def destroy() -> None:
    """Leaves the world; does nothing where there is none."""
    if dist.is_initialized():
        state.destroy_model_parallel()
        dist.destroy_process_group()


def sum_over_shares(values: torch.Tensor) -> torch.Tensor:
    """Sum over the data-parallel ranks, in place; collective."""
    dist.all_reduce(values, group=state.get_data_parallel_group())
    return values


def max_over_shares(value: int) -> int:
    """Largest over the data-parallel ranks; collective."""
    largest = torch.tensor(value, device=cpu_platform.device())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=state.get_data_parallel_group())
    return int(largest)


def reports_for_share() -> bool:
    """Whether this rank speaks for its data-parallel share: the first of its tensor-parallel group."""
    return state.get_tensor_model_parallel_rank() == 0


def is_first() -> bool:
    """Whether this is rank 0 of the world."""
    return dist.get_rank() == 0


def in_first_copy() -> bool:
    """Whether this rank belongs to the first data-parallel copy of the model."""
    return state.get_data_parallel_rank() == 0
