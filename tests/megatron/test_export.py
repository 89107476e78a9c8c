"""A folder written by `export` is the model: transformers loads it, with the same weights."""

from __future__ import annotations

import dataclasses
import functools
import shutil
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


def export(world: World, folder: Path, out: Path, layout: Layout, **settings: Any) -> dict[str, Any]:
    """Exports an untouched model and returns what `weights` puts out."""
    stage = ActorUpdate(ActorUpdate.Config(model=str(folder), groups_per_step=2, layout=layout, **settings))
    stage.setup(world)
    stage.export(out)
    return dict(stage.weights())


def check_equal(hf_model: Any, source: Path, out: Path) -> None:
    wanted, exported = hf_model(source).state_dict(), hf_model(out).state_dict()
    assert set(wanted) == set(exported)
    assert all(torch.equal(wanted[name], exported[name]) for name in wanted)


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2),
    "tp2 sp pp2 vpp2": Layout(tp=2, sp=True, pp=2, vpp=2),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_export_is_bit_equal_to_the_source(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, kind: str, tied: bool, layout: Layout
) -> None:
    source = tiny(kind, tied, 4 if layout.vpp > 1 else 2)
    launch(layout.size, export, source, tmp_path / "out", layout)
    check_equal(hf_model, source, tmp_path / "out")


MOE_LAYOUTS = {
    "one": Layout(),
    "tp2 sp etp2": Layout(tp=2, sp=True),
    "tp2 sp ep2 etp1": Layout(tp=2, sp=True, ep=2, etp=1),
    "pp2 dp2 ep2": Layout(pp=2, dp=2, ep=2),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", MOE_LAYOUTS.values(), ids=MOE_LAYOUTS)
def test_export_of_experts_is_bit_equal_to_the_source(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, kind: str, tied: bool, layout: Layout
) -> None:
    launch(layout.size, export, tiny(kind, tied), tmp_path / "out", layout)
    check_equal(hf_model, tiny(kind, tied), tmp_path / "out")


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2, dp=2, ep=2)], ids=["tp2 sp", "pp2 dp2 ep2"])
def test_random_weights_are_the_same_in_every_layout(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, layout: Layout
) -> None:
    (tmp_path / "m").mkdir()
    shutil.copyfile(tiny("qwen3_moe") / "config.json", tmp_path / "m/config.json")
    one = launch(1, functools.partial(export, random_weights=True), tmp_path / "m", tmp_path / "one", Layout())[0]
    launch(layout.size, functools.partial(export, random_weights=True), tmp_path / "m", tmp_path / "out", layout)
    check_equal(hf_model, tmp_path / "one", tmp_path / "out")
    assert one["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert (one["model.norm.weight"] == 1).all()


def test_a_folder_without_weights_says_how_to_begin_without(tiny: Any, tmp_path: Path) -> None:
    shutil.copyfile(tiny("llama") / "config.json", tmp_path / "config.json")
    config = ActorUpdate.Config(model=str(tmp_path), groups_per_step=2)
    (fault,) = ActorUpdate(config).faults()
    assert "neither model.safetensors nor model.safetensors.index.json; random_weights=True begins without" in fault
    assert ActorUpdate(dataclasses.replace(config, random_weights=True)).faults() == []


def test_transformers_misses_and_adds_nothing(launch: Any, tiny: Any, tmp_path: Path) -> None:
    launch(2, export, tiny("qwen2", True), tmp_path / "out", Layout(tp=2))
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_weights_come_out_on_rank_0_only(launch: Any, tiny: Any, tmp_path: Path) -> None:
    first, second = launch(2, export, tiny("llama", True), tmp_path / "out", Layout(tp=2))
    assert "lm_head.weight" not in first
    assert first["model.embed_tokens.weight"].shape == (131, 64)
    assert not second


def test_bfloat16_folder_says_so(launch: Any, tiny: Any, tmp_path: Path) -> None:
    launch(1, functools.partial(export, dtype="bfloat16"), tiny("llama"), tmp_path / "out", Layout())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_large_models_get_an_index(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "MAX_FILE_BYTES", 40_000)
    launch(1, export, tiny("llama"), tmp_path / "out", Layout())
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    launch(1, export, tmp_path / "out", tmp_path / "again", Layout())
    source, exported = hf_model(tiny("llama")).state_dict(), hf_model(tmp_path / "again").state_dict()
    assert all(torch.equal(source[name], exported[name]) for name in source)
