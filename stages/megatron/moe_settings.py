"""How a mixture of experts is run and balanced. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollstream.stages.errors import check_rules
from rollstream.stages.names import known_names

if TYPE_CHECKING:
    from rollstream.stages.megatron.layout import Layout

#: Ways to bring tokens to their experts, by Megatron's names.
DISPATCHERS = ("allgather", "alltoall", "flex")


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Settings of models with experts; a dense model reads none of them.

    Both losses are 0 by default, whatever config.json says of them: the router of a trained model is balanced already,
    and they would move it, and with it the policy, whatever the reward says. The metrics moe/load_max and moe/load_min
    tell when a run needs them.

    >>> Moe(aux_loss_coef=1e-3).has_losses
    True
    """

    #: Weight of the load-balancing loss of the router of each layer.
    aux_loss_coef: float = 0.0
    #: Weight of the loss that keeps the logits of each router small.
    z_loss_coef: float = 0.0
    #: How tokens get to their experts: "alltoall" sends each token only where it is needed; "allgather" sends all
    #: tokens to all ranks, which must be ranks of one pack; "flex" needs CUDA and the package DeepEP.
    dispatcher: str = "alltoall"

    def __post_init__(self) -> None:
        check_rules(
            [
                (0 <= self.aux_loss_coef < math.inf, f"moe aux_loss_coef must be at least 0, got {self.aux_loss_coef}"),
                (0 <= self.z_loss_coef < math.inf, f"moe z_loss_coef must be at least 0, got {self.z_loss_coef}"),
                (
                    self.dispatcher in DISPATCHERS,
                    f"moe dispatcher must be one of the known, got {self.dispatcher!r}: "
                    f"{known_names(str(self.dispatcher), DISPATCHERS)}",
                ),
            ]
        )

    @property
    def has_losses(self) -> bool:
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0

    def faults(self, layout: Layout) -> list[str]:
        """Why a model with experts can't be run so in this layout: one sentence each."""
        faults: list[str] = []
        if self.dispatcher == "flex" and layout.expert_tp * layout.ep == 1:
            faults.append("moe dispatcher 'flex' needs ep times etp above 1; use 'alltoall'")
        if self.dispatcher != "allgather":
            return faults
        if layout.tp % (layout.ep * layout.expert_tp):
            faults.append(
                f"moe dispatcher 'allgather' needs ep={layout.ep} times etp={layout.expert_tp} to divide "
                f"tp={layout.tp}: it gathers packs of one length only; use 'alltoall'"
            )
        if layout.pp > 1:
            faults.append(f"moe dispatcher 'allgather' needs pp=1, got pp={layout.pp}; use 'alltoall'")
        return faults
