"""The model in a checkpoint, as a folder for transformers or PEFT: on one rank, whatever layout wrote it.

Needs no Ray, and of the model folder only config.json and the tokenizer's files: a checkpoint holds all weights, also
those that adapters left as they were.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from rollstream.stages.base import World
from rollstream.stages.errors import CheckpointError
from rollstream.stages.megatron import checkpoint, export, hf_config, lora, parallel
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.model import build
from rollstream.stages.megatron.settings import MegatronConfig
from rollstream.stages.megatron.weights import Gatherer


def export_checkpoint(folder: Path, out: Path, *, adapter: bool = False, model: Path | None = None) -> None:
    """Writes `out` from the checkpoint `folder` of an ActorUpdate. Joins a world of one rank, and leaves it.

    Adapters are merged into the weights; with `adapter` they alone are written, as PEFT has them. `model` is the model
    folder that the run began with, if it has moved since.

    Raises CheckpointError where `folder` has no policy, the model folder is not there or is another model's, and where
    `adapter` is asked for and none was trained.
    """
    saved = _saved_policy(folder)
    trained = Lora(**saved["lora"]) if saved["lora"] else None
    if adapter and trained is None:
        raise CheckpointError(f"{folder} has no adapters: all weights were trained; export it without --adapter")
    settings = _settings(saved, model)
    parallel.init(World(), settings.layout, seed=0)
    try:
        with on_platform():
            config = hf_config.read(Path(settings.model))
            chunks = build(config, settings)
            if trained is not None:
                lora.add_lora(chunks, trained, config)
            checkpoint.load_weights(chunks, folder)
        if adapter and trained is not None:
            lora.export_adapter(out, chunks, trained, config)
        else:
            export.write(out, Gatherer(chunks, config).tensors(), config)
    finally:
        parallel.destroy()


def _saved_policy(folder: Path) -> dict[str, Any]:
    try:
        return checkpoint.saved_policy(folder)
    except (OSError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{folder} has no policy that can be exported ({type(error).__name__}: {error}): its run trained nothing, "
            "or had an update stage that writes files of its own"
        ) from error


def _settings(saved: dict[str, Any], model: Path | None) -> MegatronConfig:
    folder = model or Path(saved["model"])
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the model folder {str(folder)!r} is not there, or has no config.json: the export takes it and the "
            "tokenizer's files from the folder that the run began with. Say where that is (--model FOLDER)"
        )
    return MegatronConfig(model=str(folder), dtype=saved["dtype"])
