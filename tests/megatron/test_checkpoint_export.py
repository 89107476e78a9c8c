"""`rollstream export`: the weights that were trained, from a checkpoint of any layout, in this process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollstream.graphs.checkpoint import Checkpoints, RunState
from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.errors import CheckpointError
from rollstream.stages.megatron.checkpoint_export import export_checkpoint
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora

pytestmark = pytest.mark.megatron


def save_trained(world: World, model: Path, groups: Any, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint after one step, and the weights that it should hold."""
    layout = settings["layout"]
    stage = ActorUpdate(ActorUpdate.Config(model=str(model), groups_per_step=2, lr=1e-2, max_mismatch=None, **settings))
    stage.setup(world)
    stage.update(groups[stage.share_of(world.rank) :: layout.dp])
    stage.save(folder)
    stage.finish_save()
    return dict(stage.weights())


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2 pp 2": ("qwen2", {"layout": Layout(tp=2, pp=2, sp=True)}),
    "experts": ("qwen3_moe", {"layout": Layout(dp=2, ep=2)}),
    "bfloat16": ("llama", {"layout": Layout(tp=2), "dtype": "bfloat16"}),
    "lora": ("qwen3", {"layout": Layout(tp=2), "lora": Lora(rank=4)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_exported_weights_are_those_of_the_policy(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, way: str
) -> None:
    kind, settings = WAYS[way]
    groups = make_groups(num_groups=2)
    trained = launch(settings["layout"].size, save_trained, tiny(kind), groups, tmp_path / "ck", settings)[0]
    launch(1, lambda world: export_checkpoint(tmp_path / "ck", tmp_path / "out"))
    exported, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tiny(kind)))
    assert set(exported) == set(base) == set(trained)
    assert all(np.array_equal(exported[name].float().numpy(), trained[name]) for name in base)
    assert any(not torch.equal(exported[name].float(), base[name]) for name in base)


def test_peft_gives_the_merged_weights_with_the_exported_adapters(
    launch: Any, tiny: Any, make_groups: Any, hf_model: Any, tmp_path: Path
) -> None:
    import peft

    kind, settings = WAYS["lora"]
    launch(2, save_trained, tiny(kind), make_groups(num_groups=2), tmp_path / "ck", settings)
    launch(1, lambda world: export_checkpoint(tmp_path / "ck", tmp_path / "merged"))
    launch(1, lambda world: export_checkpoint(tmp_path / "ck", tmp_path / "adapter", adapter=True))
    merged = hf_model(tmp_path / "merged").state_dict()
    adapted = peft.PeftModel.from_pretrained(hf_model(tiny(kind)), tmp_path / "adapter").merge_and_unload()
    for name, weight in adapted.state_dict().items():
        torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)


def test_what_can_not_be_exported_is_said(launch: Any, tiny: Any, make_groups: Any, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny("llama"), moved)
    launch(1, save_trained, moved, make_groups(num_groups=2), tmp_path / "ck", {"layout": Layout()})
    shutil.rmtree(moved)

    def errors(world: World) -> list[str]:
        told: list[str] = []
        (tmp_path / "toy").mkdir()
        for folder, options in [("toy", {}), ("ck", {}), ("ck", {"adapter": True}), ("ck", {"model": tiny("qwen2")})]:
            with pytest.raises(CheckpointError) as caught:
                export_checkpoint(tmp_path / folder, tmp_path / "out", **options)
            told.append(str(caught.value))
        export_checkpoint(tmp_path / "ck", tmp_path / "out", model=tiny("llama"))
        return told

    toy, missing, no_adapters, other = launch(1, errors)[0]
    assert toy.startswith(f"{tmp_path / 'toy'} has no policy that can be exported (FileNotFoundError: ")
    assert missing.startswith(f"the model folder '{moved}' is not there")
    assert "--model FOLDER" in missing
    assert no_adapters == f"{tmp_path / 'ck'} has no adapters: all weights were trained; export it without --adapter"
    assert other.startswith(f"the policy can't be loaded from {tmp_path / 'ck'} (")
    assert len(other) < 800


@pytest.fixture
def checkpoint(launch: Any, tiny: Any, make_groups: Any, tmp_path: Path) -> Path:
    """A checkpoint of a run of its own, as a run publishes it."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    writing = checkpoints.begin(3)
    launch(2, save_trained, tiny("llama"), make_groups(num_groups=2), writing, {"layout": Layout(tp=2)})
    state = RunState(step=3, version=3, ledger={}, data="", graph="", settings={}, packages={})
    return checkpoints.publish(writing, state)


def command(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    line = [str(Path(sys.executable).with_name("rollstream")), "export", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=90)


def test_the_command_makes_a_folder_for_transformers(checkpoint: Path, hf_model: Any, tmp_path: Path) -> None:
    done = command(checkpoint, tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, f"model for transformers: {tmp_path / 'out'}\n"), done.stderr
    assert hf_model(tmp_path / "out").num_parameters() > 0


def test_the_command_says_what_to_give(checkpoint: Path, tmp_path: Path) -> None:
    told = command(checkpoint.parents[1], tmp_path / "out")
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == (
        f"CheckpointError: {checkpoint.parents[1]} is not a checkpoint, it has no state.json: "
        f"the newest in it is {checkpoint}\n"
    )
    assert "is there already: give a folder that is empty" in command(checkpoint, tmp_path).stderr
    next(checkpoint.glob("*.distcp")).unlink()
    assert "is not whole: __" in command(checkpoint, tmp_path / "out").stderr
