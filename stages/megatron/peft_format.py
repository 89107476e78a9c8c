"""Adapter folders as PEFT writes and loads them: adapter_config.json and adapter_model.safetensors. Loads torch.

Experts have an adapter each, under the names that their weights have in a checkpoint
(`model.layers.0.mlp.experts.3.gate_proj`). Where a model class stacks its experts, with gate and up in one tensor, PEFT
makes one adapter of twice the rank out of those of gate and up, which is exact; it takes none for one of them alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollstream.stages.megatron.lora_settings import Lora, target_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."

#: Settings of PEFT that change what an adapter computes, and the only values that we have.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "target_parameters": None,
    "layers_to_transform": None,
}


def write(folder: Path, tensors: dict[str, Tensor], settings: Lora, base_model: str) -> None:
    """Writes all tensors of an adapter, named as by `lora.adapter_tensors`; called on one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {f"{_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    values = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted({name.split(".")[-2] for name in tensors}),
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


class AdapterFolder:
    """The tensors of an adapter folder, read one at a time: `folder["model.layers.0.self_attn.q_proj.lora_A"]`.

    Raises ValueError, on opening, where the adapter is not what `settings` say, and for a tensor that is not there.
    """

    def __init__(self, folder: Path, settings: Lora):
        for path in (folder / CONFIG, folder / WEIGHTS):
            if not path.is_file():
                raise ValueError(f"{str(folder)!r} has no {path.name}: give a folder that PEFT can load")
        self._folder = folder
        self._file: Any = safe_open(folder / WEIGHTS, framework="pt")
        self._names = set(self._file.keys())
        faults = _faults(json.loads((folder / CONFIG).read_text()), settings)
        targets = {target_of(name.removesuffix(".weight").rpartition(".")[0]) for name in self._names}
        if targets != set(settings.targets):
            faults.append(f"it adapts {sorted(targets)}, the settings {sorted(settings.targets)}")
        if faults:
            raise ValueError(f"adapter {str(folder)!r} doesn't fit the lora settings: " + "; ".join(faults))

    def __getitem__(self, name: str) -> Tensor:
        stored = f"{_PREFIX}{name}.weight"
        if stored not in self._names:
            raise ValueError(f"adapter {str(self._folder)!r} has no tensor {stored!r}: it is of another model")
        return self._file.get_tensor(stored)


def _faults(values: dict[str, Any], settings: Lora) -> list[str]:
    wanted = {"r": settings.rank, "lora_alpha": settings.alpha}
    differing = {name: value for name, value in wanted.items() if values.get(name) != value}
    odd = {name: values[name] for name, plain in _PLAIN.items() if (values.get(name) or plain) != plain}
    return [
        *(f"its {name} is {values.get(name)}, the settings say {value}" for name, value in differing.items()),
        *(f"{name}={value!r} is not supported" for name, value in odd.items()),
    ]
