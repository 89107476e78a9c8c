"""What stages take of the GPUs that they share, and what is chosen by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import GetTimeoutError

from rollstream.graphs import colocation
from rollstream.placement import Bundle, Demand, Placement, shared
from rollstream.stages.actor import ActorUpdate
from rollstream.stages.errors import PlacementError
from rollstream.stages.megatron.hf_config import read
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.memory import num_parameters
from rollstream.stages.memory import Memory
from rollstream.stages.rollout import Rollout

GB = 1e9
DEMANDS = [
    Demand(stage="rollout", uses_device=True),
    Demand(stage="reward"),
    Demand(stage="actor", uses_device=True),
]
ENGINE = Memory(parts={"engine": int(60 * GB)}, freed={"engine"})
TRAINER = Memory(
    parts={"weights": int(10 * GB), "optimizer": int(30 * GB), "activations": int(20 * GB)},
    freed={"optimizer", "activations"},
    could_free="offload=('parameters', 'gradients', 'optimizer')",
)


def planned(device_gb: float, *, wanted: Any = "auto", max_staleness: int = 0, engine: Memory = ENGINE) -> Any:
    plan = Placement.colocated(cpus=3, gpus=1).plan(DEMANDS)
    memories, turns = {"rollout": engine, "actor": TRAINER}, {"rollout": 0, "actor": 1}
    return shared(plan, memories, turns, device_bytes=int(device_gb * GB), wanted=wanted, max_staleness=max_staleness)


@pytest.mark.parametrize(("device_gb", "turns"), [(140, False), (120, True), (80, True)])
def test_side_by_side_where_all_fits_and_by_turns_where_each_turn_does(device_gb, turns):
    assert planned(device_gb).turns is turns


def test_the_plan_shows_the_parts_and_the_choice():
    assert str(planned(80)).splitlines()[2:] == [
        "memory",
        "  bundle 0, GPU 0 of 80.0 GB",
        "    rollout[0] 60.0 GB: engine 60.0",
        "    actor[0] 60.0 GB: weights 10.0, optimizer 30.0, activations 20.0",
        "    by turns, 70.0 GB to generate, 60.0 GB to train (estimates)",
    ]
    assert "side by side, 120.0 GB at once" in str(planned(140))


def test_what_is_only_estimated_does_not_refuse_a_plan():
    plan = planned(107, max_staleness=1)  # 100 GB are sure, 20 GB a guess
    assert not plan.turns
    assert "more than the 101.7 GB that there are to use: activations may not fit; lower max_tokens" in plan.memory


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device_gb": 60}, r"(?s)not room for all on one GPU:.*rollout\[0\] 60.0 GB.*lower the rollout's gpu_memory"),
        ({"device_gb": 80, "max_staleness": 1}, r"To take turns set actor: offload=.*; max_staleness=0. Else lower"),
        (
            {"device_gb": 140, "wanted": "turns", "max_staleness": 2},
            r"'turns' needs max_staleness=0 .*got max_.*=2",
        ),
        (
            {"device_gb": 80, "engine": Memory(parts={"engine": int(60 * GB)}, could_free="enable_sleep_mode")},
            "set actor: offload=.*; rollout: enable_sleep_mode. Else lower",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(settings, says):
    with pytest.raises(PlacementError, match=says):
        planned(**settings)


def test_what_is_wanted_is_done_where_it_can_be():
    assert planned(140, wanted="turns").turns
    with pytest.raises(PlacementError, match="not room"):
        planned(80, wanted="side_by_side")


def test_gpus_of_their_own_are_shared_with_nobody():
    placement = Placement.fixed([Bundle(2, 1), Bundle(2, 1)], {"actor": 1})
    memories, turns = {"rollout": ENGINE, "actor": TRAINER}, {"rollout": 0, "actor": 1}
    plan = shared(placement.plan(DEMANDS), memories, turns, device_bytes=int(70 * GB), wanted="auto", max_staleness=3)
    assert not plan.turns
    assert plan.memory.count("side by side, 60.0 GB") == 2


def test_an_engine_over_several_gpus_gets_them_whole():
    demands = [replace(DEMANDS[0], num_devices=2), *DEMANDS[1:]]
    plan = Placement.fixed([Bundle(2, 2), Bundle(2, 1)], {"actor": 1}).plan(demands)
    assert [plan.seats[stage][0].gpus for stage in ("rollout", "actor")] == [2, 1]
    with pytest.raises(PlacementError, match=r"'rollout' needs 2 whole GPUs .*bundle 0 \(3 CPU \+ 1 GPU\) leaves it"):
        Placement.colocated(cpus=3, gpus=1).plan(demands)


def test_each_bundle_of_an_engine_over_several_gpus_must_hold_it():
    demands = [replace(DEMANDS[0], num_actors=2, num_devices=2), *DEMANDS[1:]]
    placement = Placement.fixed([Bundle(2, 2), Bundle(2, 1), Bundle(2, 1)], {"rollout": [0, 1], "actor": 2})
    with pytest.raises(PlacementError, match=r"'rollout' needs 2 whole GPUs .*bundle 1 \(2 CPU \+ 1 GPU\) leaves it"):
        placement.plan(demands)


def test_turns_need_the_size_of_a_gpu(monkeypatch):
    def deaf(*_: Any, **__: Any) -> Any:
        raise GetTimeoutError

    make = SimpleNamespace(remote=lambda: None)
    fake = SimpleNamespace(remote=lambda **_: lambda _: make, get=deaf)
    monkeypatch.setattr(colocation, "ray", fake)
    placement = Placement(bundles=(Bundle(3, 1),), sharing="turns")
    with pytest.raises(PlacementError, match=r"needs to know how large a GPU is.*give device_gb, such as"):
        colocation.device_bytes(placement, placement.plan(DEMANDS))
    assert colocation.device_bytes(replace(placement, sharing="auto"), placement.plan(DEMANDS)) is None
    assert colocation.device_bytes(replace(placement, device_gb=80), placement.plan(DEMANDS)) == 80 * GB


def test_unknown_ways_to_share_are_refused():
    with pytest.raises(PlacementError, match=r"sharing is not known, got 'turn'.*did you mean 'turns'"):
        Placement(sharing="turn")  # pyright: ignore[reportArgumentType]


# What stages say of themselves.


def test_a_vllm_engine_takes_its_share_and_frees_it_where_it_may_sleep(tiny_llama):
    args = {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2}
    made = Rollout(Rollout.Config(model=tiny_llama, max_tokens=4, engine="vllm", engine_args=args))
    memory = made.memory(1000)
    assert memory is not None
    assert (memory.total(), memory.total(resting=True), made.devices_per_rank) == (500, 500, 2)
    sleepy = replace(made.config, engine_args={**args, "enable_sleep_mode": True})
    memory = Rollout(sleepy).memory(1000)
    assert memory is not None
    assert memory.total(resting=True) == 0


def test_a_transformers_engine_frees_all_it_has(tiny_llama):
    memory = Rollout(Rollout.Config(model=tiny_llama, max_tokens=10, n=3, groups_in_flight=2)).memory(0)
    assert memory is not None
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, their size, float32
    assert memory.parts["kv_cache"] == 2 * 3 * 10 * token_bytes
    assert memory.total(resting=True) == 0


def test_a_trainer_frees_what_it_offloads(tiny_llama):
    config = ActorUpdate.Config(model=tiny_llama, groups_per_step=1, dtype="bfloat16", offload=("optimizer",))
    memory = ActorUpdate(config).memory(1)
    weights = memory.parts["weights"]
    assert memory.parts["optimizer"] == 6 * weights  # two moments and main weights, 4 bytes each
    assert memory.parts["gradients"] == 2 * weights
    assert memory.parts["published"] == weights
    assert memory.total(resting=True) == 4 * weights


@pytest.fixture
def tiny_llama(tmp_path: Path) -> str:
    """A folder with a config.json."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48},
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_as_transformers_counts_them(kind, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        **KINDS[kind],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    found = read(tmp_path)
    whole = sum(p.numel() for p in model.parameters())
    assert num_parameters(found, Layout()) == whole
    halves = num_parameters(found, Layout(pp=2)) - num_parameters(found, Layout(pp=4))
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert halves == layer


def test_a_plan_says_so_where_nobody_knows_how_large_a_gpu_is():
    plan, graph = Placement.colocated(cpus=2, gpus=1).plan(DEMANDS), cast("Any", None)
    assert "not estimated" in str(colocation.with_sharing(graph, Placement.auto(), plan, None))
