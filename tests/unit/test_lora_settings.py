from __future__ import annotations

from typing import Any

import pytest

from rollstream.stages.errors import ConfigError
from rollstream.stages.megatron.lora_settings import TARGETS, Lora, target_of


def test_all_linear_is_every_target() -> None:
    assert Lora().targets == TARGETS


def test_targets_have_one_order() -> None:
    assert Lora(target_modules=["down_proj", "q_proj"]).targets == ("q_proj", "down_proj")


def test_scale_is_alpha_over_rank() -> None:
    assert Lora(rank=8, alpha=12.0).scale == 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "lora rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "lora alpha must be above 0"),
        ({"dropout": 1.0}, "lora dropout must be from 0 to below 1"),
        ({"target_modules": ("q_prog",)}, "no module 'q_prog': did you mean 'q_proj'"),
        ({"target_modules": "q_proj"}, "must be 'all-linear' or a tuple of names, got 'q_proj'"),
        ({"target_modules": ()}, "must name a module"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lora(**settings)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)rank.*alpha.*no module 'x'"):
        Lora(rank=0, alpha=-1.0, target_modules=("x",))


def test_mixtral_has_names_of_its_own() -> None:
    assert [target_of(f"block_sparse_moe.experts.1.w{i}") for i in (1, 2, 3)] == ["gate_proj", "down_proj", "up_proj"]


def test_half_of_an_experts_input_is_refused() -> None:
    (fault,) = Lora(target_modules=("up_proj", "q_proj")).expert_faults()
    assert "has up_proj without its other half" in fault
    assert Lora().expert_faults() == Lora(target_modules=("q_proj", "down_proj")).expert_faults() == []
