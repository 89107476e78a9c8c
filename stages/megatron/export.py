"""Writes a model folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rollstream.stages.megatron import hf_config, rules
from rollstream.stages.megatron.folder import Folder
from rollstream.stages.megatron.hf_config import HFConfig

#: A file of weights is closed when it holds this much; only that much is in memory at a time.
MAX_FILE_BYTES = 4 << 30

#: Files of the source folder that go with every model: the tokenizer's and the generation settings.
COMPANIONS = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], config: HFConfig) -> None:
    """Writes weights, config.json and the companions into `folder`, then checks what was written.

    Called on one rank, with all weights. Raises RuntimeError where a tensor is missing or has a wrong shape.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(folder, tensors)
    settings = hf_config.load_json(config.folder)
    settings.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": dtype}, indent=2) + "\n")
    for pattern in COMPANIONS:
        for path in sorted(config.folder.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    _check(folder, config)


def _write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Writes the files and, if there are several, their index; returns the dtype's name."""
    file_of: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    pending_bytes = num_bytes = 0
    dtype = "float32"

    def flush() -> None:
        nonlocal pending_bytes
        name = f"model-{len(set(file_of.values())) + 1:05d}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(pending, name))
        pending.clear()
        pending_bytes = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > MAX_FILE_BYTES:
            flush()
        pending[name] = tensor
        pending_bytes += size
        num_bytes += size
        dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(set(file_of.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def _check(folder: Path, config: HFConfig) -> None:
    written, wanted = Folder(folder), rules.hf_shapes(config)
    wrong = sorted(set(written.file_of) ^ set(wanted))
    wrong += [name for name in wanted if name in written.file_of and written.shape(name) != wanted[name]]
    if wrong:
        raise RuntimeError(f"export to {folder} is not the model of {config.folder}: wrong tensors {wrong[:5]}")
