"""What a process of a stage takes of its device, by estimate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

#: Parts whose estimate is rough: they depend on the samples.
ROUGH = frozenset({"activations", "logits", "kv_cache"})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part.

    >>> m = Memory(parts={"weights": 10, "optimizer": 60, "activations": 30}, freed={"optimizer", "activations"})
    >>> m.total(), m.total(resting=True), m.total(rough=False)
    (100, 10, 70)
    """

    parts: Mapping[str, int]
    #: Parts that are given back while the stage rests.
    freed: Collection[str] = frozenset()
    #: Settings that would free more, for people: "offload=('optimizer',)".
    could_free: str = ""

    def total(self, *, resting: bool = False, rough: bool = True) -> int:
        """Of all parts; of those that stay while it rests; with or without those that are rough."""
        return sum(
            size
            for name, size in self.parts.items()
            if not (resting and name in self.freed) and (rough or name not in ROUGH)
        )
