"""Names and shapes of the tensors in a model's folder, to hold new weights against."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rollstream.stages.errors import StageError


class FolderTensors:
    """Of the safetensors files of a folder; a folder without any says nothing, and all is let through."""

    def __init__(self, folder: str | Path):
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            self._shapes |= _shapes_in(path)
        config = json.loads((Path(folder) / "config.json").read_text())
        tied = bool(config.get("tie_word_embeddings"))
        self._optional = {"lm_head.weight"} if tied else set[str]()

    def check(
        self, version: int, tensors: Iterable[tuple[str, np.ndarray]], stage: str
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors as they come. Raises StageError once all came: unknown, missing, or of another shape."""
        faults: list[str] = []
        arrived: set[str] = set()
        for name, array in tensors:
            arrived.add(name)
            wanted = self._shapes.get(name)
            if wanted is not None and tuple(array.shape) != wanted:
                faults.append(f"{name} must have shape {wanted}, got {tuple(array.shape)}")
            elif wanted is None and self._shapes and name not in self._optional:
                faults.append(f"{name} is not a parameter of the model")
            elif not faults:
                yield name, array
        faults += [f"{name} did not arrive" for name in self._shapes if name not in arrived | self._optional]
        if faults:
            raise StageError(stage, f"weights of version {version}", "\n".join(faults))


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """From the header of a safetensors file: its length in 8 bytes, little-endian, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
