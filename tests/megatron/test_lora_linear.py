"""The adapters of one feed-forward layer, dense or an expert, against plain matrices, however its ranks share it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rollstream.stages.base import World
from rollstream.stages.megatron import parallel
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_linear import Pair, adapt
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.mcore import (
    ColumnParallelLinear,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    RowParallelLinear,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    finalize_model_grads,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

pytestmark = pytest.mark.megatron

HIDDEN, FFN, TOKENS, RANK = 16, 24, 10, 3
SETTINGS = Lora(rank=RANK, alpha=6.0)


def tensor(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 3


WEIGHTS = {"gate": tensor(FFN, HIDDEN, seed=1), "up": tensor(FFN, HIDDEN, seed=2), "down": tensor(HIDDEN, FFN, seed=3)}
PAIRS = {
    name: (tensor(RANK, weight.shape[1], seed=index + 10), tensor(weight.shape[0], RANK, seed=index + 20))
    for index, (name, weight) in enumerate(WEIGHTS.items())
}
INPUT, OUTPUT_GRADIENT = tensor(TOKENS, 1, HIDDEN, seed=4), tensor(TOKENS, 1, HIDDEN, seed=5)


def plain() -> dict[str, np.ndarray]:
    """Output and gradients of plain matrices."""
    x = INPUT.clone().requires_grad_()
    pairs = {name: (a.clone().requires_grad_(), b.clone().requires_grad_()) for name, (a, b) in PAIRS.items()}
    full = {name: WEIGHTS[name] + SETTINGS.scale * b @ a for name, (a, b) in pairs.items()}
    out = F.linear(F.silu(F.linear(x, full["gate"])) * F.linear(x, full["up"]), full["down"])
    (out * OUTPUT_GRADIENT).sum().backward()
    found: dict[str, Any] = {"out": out.detach(), "x": x.grad}
    found |= {f"{name}.{which}": p.grad for name, pair in pairs.items() for which, p in zip("ab", pair, strict=True)}
    return {name: value.numpy() for name, value in found.items()}


class Layer(torch.nn.Module):
    """Two linears of Megatron's with a gated activation between them, as in its MLP."""

    def __init__(self, config: TransformerConfig, is_expert: bool, settings: Lora):
        super().__init__()
        self.config = config
        more: Any = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False, "skip_bias_add": True}
        more["is_expert"] = is_expert
        self.fc1 = ColumnParallelLinear(HIDDEN, 2 * FFN, **more)
        self.fc2 = RowParallelLinear(FFN, HIDDEN, input_is_parallel=True, **more)
        group = self.fc1.tp_group
        gate, up, down = (
            WEIGHTS[name].chunk(group.size(), axis)[group.rank()]
            for name, axis in (("gate", 0), ("up", 0), ("down", 1))
        )
        with torch.no_grad():
            self.fc1.weight.copy_(torch.cat([gate, up]))
            self.fc2.weight.copy_(down)
        self.requires_grad_(False)
        rows = FFN // group.size()
        adapt(self.fc1, {"gate_proj": "gate", "up_proj": "up"}, {"gate_proj": rows, "up_proj": rows}, settings)
        adapt(self.fc2, {"down_proj": "down"}, {"down_proj": HIDDEN}, settings)
        for pair in self.pairs():
            pair.fill(*PAIRS[pair.hf_module])

    def pairs(self) -> list[Pair]:
        return [module for module in self.modules() if isinstance(module, Pair)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x)[0].chunk(2, -1)
        return self.fc2(F.silu(gate) * up)[0]


def layer_of(world: World, sequence_parallel: bool, is_expert: bool, settings: Lora = SETTINGS) -> Layer:
    parallel.init(world, Layout(tp=world.size), seed=0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=world.size,
        sequence_parallel=sequence_parallel,
    )
    return Layer(config, is_expert, settings)


@on_platform()
def split(world: World, sequence_parallel: bool, is_expert: bool) -> dict[str, np.ndarray]:
    """Output and gradients of this rank, gathered where they are split."""
    layer = layer_of(world, sequence_parallel, is_expert)
    group = layer.fc1.tp_group
    ddp = DistributedDataParallel(layer.config, DistributedDataParallelConfig(), layer)
    ddp.zero_grad_buffer()
    x = (INPUT.chunk(world.size)[world.rank] if sequence_parallel and not is_expert else INPUT).clone().requires_grad_()
    if is_expert:  # the dispatcher's part: tokens to all ranks of an expert, the sum of what they put out
        out = reduce_from_tensor_model_parallel_region(ddp(copy_to_tensor_model_parallel_region(x, group)), group)
    else:
        out = ddp(x)
    gradient = OUTPUT_GRADIENT.chunk(world.size)[world.rank] if out.shape != OUTPUT_GRADIENT.shape else OUTPUT_GRADIENT
    (out * gradient).sum().backward()
    finalize_model_grads([ddp])
    found = {"out": out.detach(), "x": x.grad}
    if out.shape != OUTPUT_GRADIENT.shape:
        found = {name: gather_from_sequence_parallel_region(value, group=group) for name, value in found.items()}
    for pair in layer.pairs():
        for which, parameter, axis in (("a", pair.a, 1), ("b", pair.b, 0)):
            parts = [parameter.main_grad]
            if axis == pair.axis:
                parts = [torch.empty_like(parts[0]) for _ in range(world.size)]
                torch.distributed.all_gather(parts, parameter.main_grad, group=group)
            found[f"{pair.hf_module}.{which}"] = torch.cat(parts, axis)
    return {name: value.numpy() for name, value in found.items()}


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "is_expert"),
    [(1, False, False), (2, False, False), (2, True, False), (1, False, True), (2, True, True)],
)
def test_every_rank_has_the_gradients_of_plain_matrices(
    launch: Any, size: int, sequence_parallel: bool, is_expert: bool
) -> None:
    wanted = plain()
    for found in launch(size, split, sequence_parallel, is_expert):
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("sequence_parallel", "is_expert", "alike"),
    [(False, False, (True, False)), (True, False, (False, False)), (True, True, (False, False))],
)
def test_ranks_drop_alike_only_what_they_hold_alike(
    launch: Any, sequence_parallel: bool, is_expert: bool, alike: tuple[bool, bool]
) -> None:
    @on_platform()
    def masks(world: World) -> list[np.ndarray]:
        layer = layer_of(world, sequence_parallel, is_expert, Lora(rank=RANK, dropout=0.5))
        return [linear.lora._dropped(torch.ones(64)).numpy() for linear in (layer.fc1, layer.fc2)]

    first, second = launch(2, masks)
    assert alike == tuple(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
