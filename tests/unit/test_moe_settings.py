from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rollstream.stages.errors import ConfigError
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.moe_settings import Moe


def test_losses_are_off_by_default() -> None:
    assert not Moe().has_losses
    assert Moe(z_loss_coef=1e-3).has_losses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aux_loss_coef": -0.1}, r"moe aux_loss_coef must be at least 0, got -0\.1"),
        ({"z_loss_coef": float("nan")}, "moe z_loss_coef must be at least 0, got nan"),
        ({"dispatcher": "all2all"}, "got 'all2all': did you mean 'alltoall'"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Moe(**settings)


@pytest.mark.parametrize(
    ("layout", "num_faults"),
    [
        (Layout(tp=2, sp=True, ep=2, etp=1), 0),
        (Layout(dp=2, ep=2), 1),
        (Layout(tp=2, sp=True, dp=2, ep=4, etp=1), 1),
        (Layout(pp=2, dp=2, ep=2), 2),
    ],
)
def test_allgather_needs_the_ranks_of_one_pack(layout: Layout, num_faults: int) -> None:
    assert len(Moe(dispatcher="allgather").faults(layout)) == num_faults
    assert Moe().faults(layout) == []


def test_importing_loads_no_torch() -> None:
    code = "import sys, rollstream.stages.megatron.moe_settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
