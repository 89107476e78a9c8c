"""RefLogprob: log-probabilities of responses under a frozen reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rollstream.stages.base import MapStage, Stage, World
from rollstream.stages.errors import check_rules
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.names import DTYPES, known_names
from rollstream.stages.schema import PER_TOKEN, Rollouts, WithRef

if TYPE_CHECKING:
    from rollstream.stages.megatron.session import RefSession


class RefLogprob(MapStage[Rollouts, WithRef]):
    """Adds `ref_logprobs`: log softmax(logits / temperature) of the reference model at each response token.

    The reference is loaded once and never changes; no gradients are kept. One replica has `tp` ranks.
    """

    uses_device = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Stage.Config):
        """Settings of the reference."""

        #: Folder of the reference model, in Hugging Face format; usually the one that training starts from.
        model: str
        #: The rollout's temperature: logits are divided by it.
        temperature: float = 1.0
        #: Tensor-parallel size: ranks that share each layer.
        tp: int = 1
        #: Samples in one forward pass.
        micro_batch_size: int = 8
        #: Precision of weights and activations: float32 or bfloat16. Log-probabilities are in float32 always.
        dtype: str = "float32"

        def __post_init__(self) -> None:
            rules = [
                (bool(self.model), "model must name a folder, got ''"),
                (0 < self.temperature < math.inf, f"temperature must be above 0, got {self.temperature}"),
                (self.tp >= 1, f"tp must be at least 1, got {self.tp}"),
                (self.micro_batch_size >= 1, f"micro_batch_size must be at least 1, got {self.micro_batch_size}"),
                (
                    self.dtype in DTYPES,
                    f"dtype must be one of the known, got {self.dtype!r}: {known_names(self.dtype, DTYPES)}",
                ),
            ]
            check_rules(rules)

    config: Config

    def __init__(self, config: Config, *, name: str | None = None):
        super().__init__(config, name=name)
        self._session: RefSession | None = None

    @property
    def num_ranks(self) -> int:
        return self.config.tp

    def faults(self) -> list[str]:
        return Layout(tp=self.config.tp).faults(self.config.model)

    def setup(self, world: World) -> None:
        from rollstream.stages.megatron.session import RefSession

        self._session = RefSession(self.config, world)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def process(self, group: pa.RecordBatch) -> Mapping[str, pa.Array]:
        assert self._session is not None, "setup comes first"
        return {"ref_logprobs": _lists(self._session.logprobs(group))}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}


def _lists(rows: list[np.ndarray]) -> pa.Array:
    """One list a row, without a Python object for each number."""
    ends = np.cumsum([0, *(len(row) for row in rows)])
    flat = np.concatenate(rows) if rows else np.zeros(0, np.float32)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, pa.float32()), type=PER_TOKEN)
