"""Low-rank adapters on a Megatron model: only they are trained, the model's own weights stay as they are.

    add_lora(chunks, settings, config, seed=0)      # after the weights are loaded, before DistributedDataParallel
    with adapters_off(chunks): ...                  # the model as it was loaded, bit for bit
    merged(chunk, name, weight)                     # a weight with its adapters in it
    export_adapter(folder, chunks, settings, config)

`lora_linear` has the arithmetic, `lora_settings` the settings, `peft_format` the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from rollstream.stages.megatron import cpu_platform, peft_format, rules
from rollstream.stages.megatron.hf_config import HFConfig
from rollstream.stages.megatron.lora_linear import (
    AdaptedColumnLinear,
    AdaptedRowLinear,
    Adapters,
    Pair,
    adapt,
)
from rollstream.stages.megatron.lora_settings import Lora, target_of
from rollstream.stages.megatron.mcore import ColumnParallelLinear, RowParallelLinear
from rollstream.stages.megatron.model import Model


def add_lora(chunks: Sequence[Model], settings: Lora, config: HFConfig, *, seed: int = 0) -> None:
    """Freezes all parameters of the chunks and puts adapters on their linears, in place.

    A starts as in PEFT (Kaiming uniform), B with zero: at first the model is what it was. The start depends on `seed`
    and the module's name alone, so every layout of ranks starts from the same. Must come before Megatron's
    DistributedDataParallel, which makes room only for the gradients of parameters that are trained.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        for path, linear in list(chunk.decoder.layers.named_modules()):
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                rule = rules.rule_of(chunk.global_name(f"decoder.layers.{path}.weight"), config)
                _adapt(linear, [name.removesuffix(".weight") for name in rule.names], settings)
        for pair in _pairs([chunk]):
            pair.fill(full_a=_initial_a(pair, seed))
        _let_gradients_in(chunk)


def _adapt(linear: Any, hf_modules: Sequence[str], settings: Lora) -> None:
    by_target = {target_of(name): name for name in hf_modules}
    wanted = {target: name for target, name in by_target.items() if target in settings.targets}
    if wanted:
        adapt(linear, wanted, dict(zip(by_target, _row_sizes(linear, len(hf_modules)), strict=True)), settings)


def _row_sizes(linear: Any, num_modules: int) -> list[int]:
    """Rows of each module in one block of the linear, as `rules.Rule` has the layout."""
    if num_modules == 3:
        c = linear.config
        return [c.num_attention_heads // c.num_query_groups * c.kv_channels, c.kv_channels, c.kv_channels]
    return [linear.weight.shape[0] // num_modules] * num_modules


def _initial_a(pair: Pair, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed} {pair.hf_module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(pair.full_shapes()[0], dtype=torch.float32, device=cpu_platform.CPU)
    return torch.nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)


def _let_gradients_in(chunk: Model) -> None:
    """Megatron's recomputation keeps a graph only behind inputs with a gradient, and the frozen embedding has none."""
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        chunk.embedding.register_forward_hook(_with_gradient)


def _with_gradient(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


@contextlib.contextmanager
def adapters_off(chunks: Iterable[torch.nn.Module]) -> Generator[None]:
    """Within it the chunks compute what they did before `add_lora`, bit for bit."""
    adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapters)]
    before = [module.enabled for module in adapters]
    for module in adapters:
        module.enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(adapters, before, strict=True):
            module.enabled = enabled


def is_adapter(parameter: str) -> bool:
    """Whether a parameter's Megatron name is that of an adapter.

    >>> is_adapter("decoder.layers.0.mlp.linear_fc2.lora.down_proj.a")
    True
    """
    return ".lora." in parameter


def merged(chunk: torch.nn.Module, name: str, weight: Tensor) -> Tensor:
    """This rank's part of the parameter `name`, whose value is `weight`, with its adapters' product added.

    Not collective. A parameter without adapters comes back as it is.
    """
    module, _, leaf = name.rpartition(".")
    linear = chunk.get_submodule(module)
    if leaf == "weight" and isinstance(linear, AdaptedColumnLinear | AdaptedRowLinear):
        return linear.lora.merged(weight)
    return weight


def adapter_tensors(chunks: Iterable[torch.nn.Module]) -> dict[str, Tensor]:
    """{"model.layers.0.self_attn.q_proj.lora_A": whole tensor on the host}, A and B of every module of the model.

    Collective over the world, whatever the layout; rank 0 alone gets tensors. Of the ranks that hold copies of an
    adapter, the first sends it: in one message for each rank, as all of them are small.
    """
    mine: dict[str, Tensor] = {}
    for pair in _pairs(chunks):
        if pair.is_first_copy:
            for which, parameter, axis in (("lora_A", pair.a, 1), ("lora_B", pair.b, 0)):
                whole = _whole(parameter.detach(), pair, axis)
                if whole is not None:
                    mine[f"{pair.hf_module}.{which}"] = whole
    if dist.get_rank() != 0:
        dist.send_object_list([mine], dst=0)
        return {}
    for source in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=source)
        mine |= received[0]
    return mine


def _whole(part: Tensor, pair: Pair, axis: int) -> Tensor | None:
    """The tensor of which each rank has a part, on the first rank of the pair's group; None on the others."""
    rank, size = pair.group.rank(), pair.group.size()
    parts: list[Tensor] | None = [part] if rank == 0 else None
    if axis == pair.axis and size > 1:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
        dist.gather(part, parts, group=pair.group, group_dst=0)
    return None if parts is None else torch.cat(parts, axis).to("cpu", copy=True)


def export_adapter(folder: Path, chunks: Sequence[Model], settings: Lora, config: HFConfig) -> None:
    """Writes the adapters of the whole model into `folder` in PEFT's format; collective over the world.

    Raises ValueError, on every rank, for adapters that PEFT has no form for.
    """
    halves = {"gate_proj", "up_proj"} & set(settings.targets)
    if config.experts is not None and len(halves) == 1:
        raise ValueError(
            f"an adapter of the experts' {halves.pop()} alone has no form in PEFT, which stacks gate and up of the "
            "experts: adapt both or neither, or take the merged weights, which are exported all the same"
        )
    tensors = dict(adapter_tensors(chunks))
    if tensors:
        peft_format.write(folder, tensors, settings, str(config.folder))


def load_adapter(folder: Path, chunks: Iterable[torch.nn.Module], settings: Lora) -> None:
    """Sets all adapters from a folder in PEFT's format. Not collective: each rank takes its own parts.

    Raises ValueError for a folder that doesn't fit `settings` or the model.
    """
    tensors = peft_format.AdapterFolder(folder, settings)
    for pair in _pairs(chunks):
        full: list[Tensor] = []
        for name, shape in zip(("lora_A", "lora_B"), pair.full_shapes(), strict=True):
            tensor = tensors[f"{pair.hf_module}.{name}"]
            if tuple(tensor.shape) != shape:
                found = f"{pair.hf_module}.{name} has shape {tuple(tensor.shape)}"
                raise ValueError(f"adapter {str(folder)!r}: {found}, the model needs {shape}")
            full.append(tensor)
        pair.fill(*full)


def _pairs(chunks: Iterable[torch.nn.Module]) -> list[Pair]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Pair)]
