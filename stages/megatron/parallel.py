"""The processes of a stage as one torch.distributed world, with Megatron's groups on it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

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
        raise ValueError(f"{layout} needs {layout.size} ranks, the world has {world.size}")
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
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
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
    """Whether this rank speaks for its data-parallel share: of the ranks that compute the loss, the first."""
    return state.get_tensor_model_parallel_rank() == 0 and computes_loss()


def computes_loss() -> bool:
    """Whether this rank holds the model's end."""
    return state.get_pipeline_model_parallel_rank() == state.get_pipeline_model_parallel_world_size() - 1


def sum_of_reports(*values: float) -> list[float]:
    """Sums of what the ranks that speak for a share have to say, on all ranks; collective over the world."""
    said = values if reports_for_share() else [0.0] * len(values)
    totals = torch.tensor(said, dtype=torch.float64, device=cpu_platform.device())
    dist.all_reduce(totals)
    return totals.tolist()


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """`values` of the last pipeline rank, in place, on all of them; collective."""
    if state.get_pipeline_model_parallel_world_size() > 1:
        group: Any = state.get_pipeline_model_parallel_group()
        dist.broadcast(values, group=group, group_src=dist.get_world_size(group) - 1)
    return values


def is_first() -> bool:
    """Whether this is rank 0 of the world."""
    return dist.get_rank() == 0
