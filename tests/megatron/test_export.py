"""A folder written by `export` is the model: transformers loads it, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.megatron import export as export_module
from rollstream.stages.megatron.layout import Layout

pytestmark = pytest.mark.megatron


def export(world: World, folder: Path, out: Path, tp: int, dp: int, dtype: str = "float32") -> dict[str, Any]:
    """Exports an untouched model and returns what `weights` puts out."""
    stage = ActorUpdate(
        ActorUpdate.Config(model=str(folder), groups_per_step=2, layout=Layout(tp=tp, dp=dp), dtype=dtype)
    )
    stage.setup(world)
    stage.export(out)
    return dict(stage.weights())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_export_is_bit_equal_to_the_source(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, kind: str, tied: bool, tp: int, dp: int
) -> None:
    launch(tp * dp, export, tiny(kind, tied), tmp_path / "out", tp, dp)
    source, exported = hf_model(tiny(kind, tied)).state_dict(), hf_model(tmp_path / "out").state_dict()
    assert set(source) == set(exported)
    assert all(torch.equal(source[name], exported[name]) for name in source)


def test_transformers_misses_and_adds_nothing(launch: Any, tiny: Any, tmp_path: Path) -> None:
    launch(2, export, tiny("qwen2", True), tmp_path / "out", 2, 1)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_weights_come_out_on_rank_0_only(launch: Any, tiny: Any, tmp_path: Path) -> None:
    first, second = launch(2, export, tiny("llama", True), tmp_path / "out", 2, 1)
    assert "lm_head.weight" not in first
    assert first["model.embed_tokens.weight"].shape == (131, 64)
    assert not second


def test_bfloat16_folder_says_so(launch: Any, tiny: Any, tmp_path: Path) -> None:
    launch(1, export, tiny("llama"), tmp_path / "out", 1, 1, "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_large_models_get_an_index(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "MAX_FILE_BYTES", 40_000)
    launch(1, export, tiny("llama"), tmp_path / "out", 1, 1)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    launch(1, export, tmp_path / "out", tmp_path / "again", 1, 1)
    source, exported = hf_model(tiny("llama")).state_dict(), hf_model(tmp_path / "again").state_dict()
    assert all(torch.equal(source[name], exported[name]) for name in source)
