"""Names and shapes of the tensors in a model's folder, to hold new weights against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class FolderTensors:
    """Of the safetensors files of a folder; a folder without any says nothing, and then nothing is wrong."""

    def __init__(self, folder: str | Path):
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            self._shapes |= _shapes_in(path)
        config = json.loads((Path(folder) / "config.json").read_text())
        tied = bool(config.get("tie_word_embeddings"))
        self._optional = {"lm_head.weight"} if tied else set[str]()

    def faults(self, tensors: Sequence[tuple[str, np.ndarray]]) -> list[str]:
        """What is unknown, missing, or of another shape: one sentence each."""
        if not self._shapes:
            return []
        arrived = {name: tuple(array.shape) for name, array in tensors}
        found = [
            f"{name} must have shape {self._shapes[name]}, got {shape}"
            for name, shape in arrived.items()
            if name in self._shapes and shape != self._shapes[name]
        ]
        known = self._shapes.keys() | self._optional
        found += [f"{name} is not a parameter of the model" for name in arrived if name not in known]
        return found + [f"{n} did not arrive" for n in self._shapes if n not in arrived.keys() | self._optional]


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """From the header of a safetensors file: its length in 8 bytes, little-endian, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
