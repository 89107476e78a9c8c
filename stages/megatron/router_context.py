"""What routers are told of the pack that goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollstream.stages.megatron import cpu_platform
from rollstream.stages.megatron.moe_settings import Moe


@dataclass(frozen=True, kw_only=True, eq=False)
class RouterContext:
    """Of one pack with T tokens, S sequences, and filler behind them. `pack_context` makes one.

    Every rank that holds layers gets the context of the whole pack, however the pack is split between ranks. Two
    contexts are equal only if they are the same object: the routers count each pack once.
    """

    #: [T] the sequence that each token belongs to; S for filler.
    sequences: Tensor
    #: [S + 1] tokens of each sequence; the last is filler's.
    lengths: Tensor
    #: Tokens of all packs of the optimizer step, on all ranks, without filler.
    num_step_tokens: int
    #: What the trainer multiplies the loss of each micro-batch by: micro-batches of a rank times data-parallel size.
    factor: float
    #: The losses' weights.
    settings: Moe
    #: [T, layers, k] experts that tokens must go to; None lets the routers choose.
    routes: Tensor | None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths) - 1


def pack_context(
    lengths: Sequence[int],
    *,
    num_filler: int,
    num_step_tokens: int,
    factor: float,
    settings: Moe,
    routes: Tensor | None = None,
) -> RouterContext:
    """The context of a pack with sequences of these lengths and `num_filler` tokens behind them, on this rank's device.

    `routes` are ids of experts for the sequences' tokens, [sum of lengths, layers of the whole model, k]; filler goes
    to the first experts. Raises ValueError unless there is a row for each token and the k experts of a row differ.

    >>> pack_context([2, 1], num_filler=1, num_step_tokens=30, factor=4.0, settings=Moe()).sequences
    tensor([0, 0, 1, 2])
    """
    sizes = torch.tensor([*lengths, num_filler])
    return RouterContext(
        sequences=torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(cpu_platform.device()),
        lengths=sizes.to(cpu_platform.device()),
        num_step_tokens=num_step_tokens,
        factor=factor,
        settings=settings,
        routes=None if routes is None else _with_filler(routes, sum(lengths), num_filler),
    )


def _with_filler(routes: Tensor, num_tokens: int, num_filler: int) -> Tensor:
    if routes.dim() != 3 or len(routes) != num_tokens:
        raise ValueError(f"routes must be [{num_tokens} tokens, layers, k], got {list(routes.shape)}")
    same = (routes.sort(-1).values.diff(dim=-1) == 0).any(-1)
    if same.any():
        token, layer = same.nonzero()[0].tolist()
        raise ValueError(
            f"routes of a token must be different experts, token {token} of the pack has "
            f"{routes[token, layer].tolist()} in layer {layer}"
        )
    filler = torch.arange(routes.shape[2]).expand(num_filler, *routes.shape[1:])
    return torch.cat([routes.long().cpu(), filler]).to(cpu_platform.device())
