"""What the parts of a mixture of experts refuse, before any rank waits for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollstream.stages.megatron.moe import ExpertLayer
from rollstream.stages.megatron.moe_settings import Moe
from rollstream.stages.megatron.router_context import pack_context

pytestmark = pytest.mark.megatron


def build(kind: str, ep: int, etp: int) -> Any:
    sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    return ExpertLayer(SimpleNamespace(moe_token_dispatcher_type=kind, **sizes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for ranks without CUDA")
def test_flex_needs_cuda() -> None:
    with pytest.raises(ValueError, match=r"moe dispatcher 'flex' needs CUDA, .*: use 'alltoall'"):
        build("flex", ep=2, etp=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for ranks without CUDA")
def test_gloo_gathers_no_parts_of_experts() -> None:
    with pytest.raises(ValueError, match="needs etp=1 or ep=1 on a rank without CUDA, got ep=2 and etp=2"):
        build("alltoall", ep=2, etp=2)


def context(lengths: list[int], routes: torch.Tensor) -> Any:
    return pack_context(lengths, num_filler=1, num_step_tokens=3, factor=1.0, settings=Moe(), routes=routes)


def test_each_token_needs_routes() -> None:
    with pytest.raises(ValueError, match=r"routes must be \[3 tokens, layers, k\], got \[2, 1, 2\]"):
        context([2, 1], torch.zeros(2, 1, 2))


def test_an_expert_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token 1 of the pack has \[2, 2\] in layer 0"):
        context([2], torch.tensor([[[0, 1]], [[2, 2]]]))


def test_filler_goes_to_the_first_experts() -> None:
    assert context([1], torch.tensor([[[3, 2]]])).routes.tolist() == [[[3, 2]], [[0, 1]]]
