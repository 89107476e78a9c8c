"""Where a model's weights come from: the safetensors of a folder, or chance."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollstream.stages.megatron import rules
from rollstream.stages.megatron.cpu_platform import device
from rollstream.stages.megatron.hf_config import HFConfig


class Folder:
    """The safetensors of a model folder, one file or many with an index; tensors are read slice by slice."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.file_of = self._index()
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"{str(self.folder)!r} has neither {single.name} nor {index.name}")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)

    def _slice(self, name: str) -> Any:
        if name not in self.file_of:
            raise ValueError(f"{str(self.folder)!r} has no tensor {name!r}")
        file = self.file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int, start: int, end: int) -> Tensor:
        """Entries `start` to `end` of one axis of a tensor."""
        part = self._slice(name)
        return part[start:end] if axis == 0 else part[:, start:end]


class RandomFolder:
    """Weights of a model's shape that are drawn by their names and `seed`: the same in every layout on one kind of
    device, which draws them itself.

    Matrices are normal with the standard deviation that config.json gives, biases 0 and norms 1, as in transformers.
    """

    def __init__(self, config: HFConfig, seed: int):
        self._shapes, self._std, self._seed = rules.hf_shapes(config), config.init_std, seed
        self._device = device()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, axis: int, start: int, end: int) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full((end - start,), 0.0 if name.endswith(".bias") else 1.0, device=self._device)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.empty(shape, device=self._device).normal_(std=self._std, generator=generator)
        return whole[start:end] if axis == 0 else whole[:, start:end]
