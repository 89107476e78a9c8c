"""What the plan says a trainer takes, against what it has: bytes of weights, gradients and optimizer state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora

pytestmark = pytest.mark.megatron

#: What an offload calls the parts of an estimate.
PARTS = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}


def held_bytes(world: World, config: ActorUpdate.Config) -> dict[str, int]:
    """Bytes of each part on this rank, by the storages that an offload would move."""
    stage = ActorUpdate(config)
    stage.setup(world)
    offload = stage.session._trainer.offload
    return {part: sum(away.nbytes for away in offload._find(kind)) for kind, part in PARTS.items()}


def fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
    return {part: max(held[part] for held in ranks) for part in PARTS.values()}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("qwen2", {}),
    "float32": ("llama", {"dtype": "float32"}),
    "copies": ("llama", {"layout": Layout(dp=2)}),
    "pieces": ("llama", {"layout": Layout(tp=2)}),
    "pipeline": ("qwen3", {"layout": Layout(pp=2)}),
    "experts": ("mixtral", {}),
    "experts, copies": ("mixtral", {"layout": Layout(dp=2)}),
    "experts dealt out": ("mixtral", {"layout": Layout(dp=2, ep=2)}),
    "experts in pieces": ("qwen3_moe", {"layout": Layout(tp=2, sp=True)}),
    "experts dealt over pieces": ("qwen3_moe", {"layout": Layout(tp=2, sp=True, ep=2, etp=1)}),
    "adapters": ("llama", {"lora": Lora(rank=32)}),
    "adapters of experts": ("mixtral", {"lora": Lora(rank=32), "layout": Layout(dp=2, ep=2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_estimate_is_what_is_held(launch: Any, tiny: Any, tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    shape = json.loads((tiny(kind, num_layers=4) / "config.json").read_text()) | {"vocab_size": 256}  # needs no padding
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = {"dtype": "bfloat16", "random_weights": True, **settings}
    config = ActorUpdate.Config(model=str(tmp_path), groups_per_step=4, **settings)
    held = fullest(launch(config.layout.size, held_bytes, config))
    parts = ActorUpdate(config).memory(0).parts
    assert {part: parts[part] for part in held} == pytest.approx(held, rel=0.05)
