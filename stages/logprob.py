"""RefLogprob: log-probabilities of responses under a frozen reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rollstream.stages.base import MapStage, World
from rollstream.stages.errors import check_rules
from rollstream.stages.megatron.memory import reference_memory
from rollstream.stages.megatron.settings import MegatronConfig, shared_rules
from rollstream.stages.memory import Memory
from rollstream.stages.schema import PER_TOKEN, Rollouts, WithRef

if TYPE_CHECKING:
    from rollstream.stages.megatron.session import RefSession


class RefLogprob(MapStage[Rollouts, WithRef]):
    """Adds `ref_logprobs`: log softmax(logits / temperature) of the reference model at each response token.

    The reference is loaded once and never changes; no gradients are kept. One replica has as many ranks as its layout.
    """

    uses_device = True

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronConfig):
        """Settings of the reference. Its model is usually the one that training starts from."""

        def __post_init__(self) -> None:
            rule = (self.layout.dp == 1, f"dp of a reference must be 1, got {self.layout.dp}: give replicas instead")
            check_rules([*shared_rules(self), rule])

    config: Config

    def __init__(self, config: Config, *, name: str | None = None):
        super().__init__(config, name=name)
        self._session: RefSession | None = None

    @property
    def num_ranks(self) -> int:
        return self.config.layout.size

    def faults(self) -> list[str]:
        return self.config.model_faults()

    def memory(self, device_bytes: int) -> Memory:
        return reference_memory(self.config)

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
