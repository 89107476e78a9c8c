"""How many ranks a Megatron stage has, and whether a model can be cut that way. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollstream.stages.megatron import hf_config


@dataclass(frozen=True)
class Layout:
    """Ranks of one stage: `dp` copies of the model, each cut into `tp` pieces. Rank r is piece r % tp of copy r // tp.

    >>> Layout(tp=2, dp=3).size
    6
    """

    #: Tensor-parallel size: ranks that share each layer.
    tp: int = 1
    #: Data-parallel size: shares that a batch is cut into.
    dp: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.dp

    def share_of(self, rank: int) -> int:
        """The data-parallel index of a rank."""
        return rank // self.tp

    def faults(self, folder: str | Path) -> list[str]:
        """Why the model in `folder` cannot be run in this layout: one sentence each. Reads only config.json."""
        faults = [
            f"{name} must be at least 1, got {value}" for name, value in (("tp", self.tp), ("dp", self.dp)) if value < 1
        ]
        try:
            config = hf_config.read(Path(folder))
        except ValueError as error:
            return [*faults, str(error)]
        if self.tp >= 1:
            faults += self._tensor_parallel_faults(config)
        return faults

    def _tensor_parallel_faults(self, config: hf_config.HFConfig) -> list[str]:
        """The vocabulary is not among them: it is padded."""
        cut = {
            "attention heads": config.num_heads,
            "key/value heads": config.num_kv_heads,
            "feed-forward size": config.ffn_size,
        }
        broken = [f"{count} {what}" for what, count in cut.items() if count % self.tp]
        if not broken:
            return []
        valid = [tp for tp in range(1, config.num_kv_heads + 1) if not any(count % tp for count in cut.values())]
        return [
            f"tp={self.tp} must divide {' and '.join(broken)} of {str(config.folder)!r}; "
            f"valid: tp={', '.join(map(str, valid))}"
        ]
