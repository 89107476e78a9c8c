"""What is trained where only low-rank adapters are. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.stages.errors import check_rules
from rollstream.stages.names import known_names

#: Hugging Face modules that can carry an adapter, in the order in which a layer uses them. In a mixture of experts the
#: last three are those of every expert, whatever its architecture calls them.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ALL_LINEAR = "all-linear"

_MIXTRAL_TARGETS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def target_of(hf_module: str) -> str:
    """The target that a Hugging Face module is.

    >>> target_of("model.layers.0.self_attn.q_proj"), target_of("model.layers.0.block_sparse_moe.experts.3.w1")
    ('q_proj', 'gate_proj')
    """
    name = hf_module.rpartition(".")[2]
    return _MIXTRAL_TARGETS.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021): the weights W stay as they are, W + alpha / rank * B A is what is trained.

    >>> Lora(rank=8, target_modules=("v_proj", "q_proj")).targets
    ('q_proj', 'v_proj')
    """

    #: Rows of A and columns of B.
    rank: int = 16
    #: The product B A is multiplied by alpha / rank.
    alpha: float = 32.0
    #: Share of an adapter's inputs that is set to zero, in training only.
    dropout: float = 0.0
    #: Modules that get an adapter: names out of `TARGETS`, or "all-linear" for all of them.
    target_modules: Sequence[str] = ALL_LINEAR

    def __post_init__(self) -> None:
        check_rules(_rules(self))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules by name, in the order of `TARGETS`."""
        return tuple(t for t in TARGETS if self.target_modules == ALL_LINEAR or t in self.target_modules)

    def expert_faults(self) -> list[str]:
        """Why a model with experts can't be trained so."""
        halves = [name for name in ("gate_proj", "up_proj") if name in self.targets]
        if len(halves) != 1:
            return []
        return [
            f"lora target_modules has {halves[0]} without its other half: PEFT holds gate_proj and up_proj of an "
            "expert in one, and could not load the adapter; take both or none"
        ]


def _rules(c: Lora) -> list[tuple[bool, str]]:
    given: Any = c.target_modules
    wrong: list[str] = []
    if not isinstance(given, str):
        wrong = [name for name in given if name not in TARGETS]
    return [
        (c.rank >= 1, f"lora rank must be at least 1, got {c.rank}"),
        (0 < c.alpha < math.inf, f"lora alpha must be above 0, got {c.alpha}"),
        (0 <= c.dropout < 1, f"lora dropout must be from 0 to below 1, got {c.dropout}"),
        (
            not isinstance(given, str) or given == ALL_LINEAR,
            f"lora target_modules must be {ALL_LINEAR!r} or a tuple of names, got {given!r}: "
            f"{known_names(str(given), (*TARGETS, ALL_LINEAR))}",
        ),
        (len(given) > 0, f"lora target_modules must name a module, got {given!r}: {ALL_LINEAR!r} takes all"),
        *((False, f"lora target_modules: no module {name!r}: {known_names(str(name), TARGETS)}") for name in wrong),
    ]
