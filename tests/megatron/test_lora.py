"""Adapters on a Megatron model compute, learn and travel as PEFT's do, however the model is cut."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.megatron import hf_config, lora, parallel
from rollstream.stages.megatron.batch import pack, read_samples
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import TARGETS, Lora
from rollstream.stages.megatron.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from rollstream.stages.megatron.optimizer import build_optimizer
from rollstream.stages.megatron.policy import Policy
from rollstream.stages.megatron.settings import MegatronConfig

pytestmark = pytest.mark.megatron

CHOICES = [
    ("qwen2", TARGETS),
    ("qwen3", ("q_proj", "v_proj")),
    ("llama", ("down_proj",)),
    ("llama", ("k_proj", "o_proj", "up_proj")),
]


ONE = Layout()
LAYOUTS = [ONE, Layout(tp=2), Layout(tp=2, sp=True)]
in_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["one rank", "tp2", "tp2 sp"])

#: Arrays by name: as such they travel from rank to test.
Tensors = dict[str, np.ndarray]


class Adapted:
    """A model with adapters on this rank; `adapter` is a folder to take them from."""

    def __init__(
        self,
        world: World,
        folder: Path,
        targets: Any,
        adapter: Path | None = None,
        *,
        layout: Layout = ONE,
        dropout: float = 0.0,
        seed: int = 0,
        recompute: Any = (),
    ):
        parallel.init(world, layout, seed=0)
        self.settings = Lora(rank=4, alpha=6.0, target_modules=targets, dropout=dropout)
        self.megatron = MegatronConfig(model=str(folder), layout=layout, override_transformer_config=dict(recompute))
        self.policy = Policy(self.megatron)
        self.config, self.chunks = self.policy.config, self.policy.chunks
        (self.model,) = self.chunks
        lora.add_lora(self.chunks, self.settings, self.config, seed=seed)
        if adapter is not None:
            lora.load_adapter(adapter, self.chunks, self.settings)

    def logprobs(self, groups: Any) -> torch.Tensor:
        return self.model(pack(read_samples(groups), multiple_of=self.megatron.layout.token_multiple))[:, 0]

    def gradients(self, groups: Any) -> None:
        """Runs Megatron's own way from a loss to `main_grad`."""
        reduction = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.ddp = DistributedDataParallel(self.model.config, reduction, self.model)
        self.ddp.zero_grad_buffer()
        loss(self.logprobs(groups)).backward()
        finalize_model_grads([self.ddp])

    def tensors(self) -> Tensors:
        return {name: tensor.numpy() for name, tensor in lora.adapter_tensors(self.chunks).items()}


def loss(logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * torch.cos(torch.arange(len(logprobs)))).sum() / 10


@pytest.fixture(scope="module")
def peft_model(tiny: Any, hf_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """peft_model(kind, targets): PEFT's model with random A and B, and the folder that it saved them in."""
    import peft

    def make(kind: str, targets: tuple[str, ...]) -> tuple[Any, Path]:
        torch.manual_seed(11)
        settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), task_type="CAUSAL_LM")
        model = peft.get_peft_model(hf_model(tiny(kind)), settings).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        folder = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture(scope="module")
def peft_logprobs(hf_logprobs: Any, make_groups: Any) -> Any:
    """peft_logprobs(model): of all response tokens of `make_groups()`, in order."""

    def score(model: Any) -> torch.Tensor:
        rows = [row for group in make_groups() for row in group.to_pylist() if row["response_ids"]]
        return torch.cat([hf_logprobs(model, row["prompt_ids"], row["response_ids"]) for row in rows])

    return score


@on_platform()
def scored(*args: Any, groups: Any, training: bool = False, **more: Any) -> np.ndarray:
    adapted = Adapted(*args, **more)
    adapted.model.train(training)
    return adapted.logprobs(groups).detach().numpy()


@in_layouts
@pytest.mark.parametrize(("kind", "targets"), CHOICES)
def test_logprobs_are_those_of_peft(
    launch: Any,
    tiny: Any,
    make_groups: Any,
    peft_model: Any,
    peft_logprobs: Any,
    kind: str,
    targets: Any,
    layout: Layout,
) -> None:
    model, adapter = peft_model(kind, targets)
    found = launch(
        layout.size, lambda *a: scored(*a, groups=make_groups(), layout=layout), tiny(kind), targets, adapter
    )
    wanted = peft_logprobs(model).detach()
    with model.disable_adapter():
        assert (wanted - peft_logprobs(model)).abs().max() > 0.05  # the adapter does something
    np.testing.assert_allclose(found[0], wanted.numpy(), rtol=0, atol=1e-5)


@in_layouts
@pytest.mark.parametrize(("kind", "targets"), CHOICES)
def test_peft_loads_what_was_exported(
    launch: Any,
    tiny: Any,
    hf_model: Any,
    peft_model: Any,
    peft_logprobs: Any,
    tmp_path: Path,
    kind: str,
    targets: Any,
    layout: Layout,
) -> None:
    import peft

    @on_platform()
    def export(*args: Any) -> None:
        adapted = Adapted(*args, layout=layout)
        lora.export_adapter(tmp_path, adapted.chunks, adapted.settings, adapted.config)

    model, adapter = peft_model(kind, targets)
    launch(layout.size, export, tiny(kind), targets, adapter)
    wanted = load_file(adapter / "adapter_model.safetensors")
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    loaded = peft.PeftModel.from_pretrained(hf_model(tiny(kind)), tmp_path).eval()
    assert torch.equal(peft_logprobs(loaded), peft_logprobs(model))


@on_platform()
def gradients(*args: Any, groups: Any, **more: Any) -> Tensors:
    adapted = Adapted(*args, **more)
    adapted.gradients(groups)
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)  # type: ignore[arg-type]
    return adapted.tensors()


def peft_gradients(model: Any, logprobs: torch.Tensor) -> Tensors:
    loss(logprobs).backward()
    strip = ("base_model.model.", ".default.weight")
    named = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix(strip[0]).removesuffix(strip[1]): grad for name, grad in named.items()}


def check(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        relative = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        assert relative <= 1e-5, (name, relative)


@in_layouts
@pytest.mark.parametrize(("kind", "targets"), CHOICES)
def test_gradients_are_those_of_peft(
    launch: Any,
    tiny: Any,
    make_groups: Any,
    peft_model: Any,
    peft_logprobs: Any,
    kind: str,
    targets: Any,
    layout: Layout,
) -> None:
    model, adapter = peft_model(kind, targets)
    found = launch(
        layout.size, lambda *a: gradients(*a, groups=make_groups(), layout=layout), tiny(kind), targets, adapter
    )
    check(found[0], peft_gradients(model, peft_logprobs(model)))


@pytest.mark.parametrize("targets", [TARGETS, ("down_proj",)])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
)
def test_gradients_outlive_recomputation(
    launch: Any, tiny: Any, make_groups: Any, peft_model: Any, recompute: Any, targets: Any
) -> None:
    _, adapter = peft_model("qwen2", targets)
    run = [tiny("qwen2"), targets, adapter]
    (plain,) = launch(1, lambda *a: gradients(*a, groups=make_groups()), *run)
    (found,) = launch(1, lambda *a: gradients(*a, groups=make_groups(), recompute=recompute), *run)
    check(found, plain)


@on_platform()
def stepped(*args: Any, groups: Any, layout: Layout) -> Any:
    """Gradient norm, adapters before and after a step, and whether the base weights are untouched."""
    adapted = Adapted(*args, layout=layout)
    before, base = adapted.tensors(), base_weights(adapted)
    adapted.gradients(groups)
    settings = ActorUpdate.Config(model="-", groups_per_step=1, lr=1e-3, weight_decay=0.1, clip_grad=0.0)
    optimizer = build_optimizer([adapted.ddp], settings)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    optimizer.step()
    same = all(torch.equal(base[name], now) for name, now in base_weights(adapted).items())
    return norm, before, adapted.tensors(), same


def base_weights(adapted: Adapted) -> dict[str, torch.Tensor]:
    named = adapted.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if not lora.is_adapter(name)}


@in_layouts
def test_a_step_changes_adapters_only(
    launch: Any, tiny: Any, make_groups: Any, peft_model: Any, peft_logprobs: Any, layout: Layout
) -> None:
    model, adapter = peft_model("qwen2", TARGETS)
    ranks = launch(
        layout.size, lambda *a: stepped(*a, groups=make_groups(), layout=layout), tiny("qwen2"), TARGETS, adapter
    )
    norm, before, after, _ = ranks[0]
    assert all(rank[3] for rank in ranks)
    assert all(0 < np.abs(after[name] - before[name]).max() < 2e-3 for name in before)
    wanted = peft_gradients(model, peft_logprobs(model))
    assert norm == pytest.approx(math.sqrt(sum(np.square(g).sum() for g in wanted.values())), rel=1e-5)


@in_layouts
def test_without_adapters_it_is_the_base_model(
    launch: Any, tiny: Any, make_groups: Any, peft_model: Any, layout: Layout
) -> None:
    @on_platform()
    def compare(world: World, *args: Any) -> tuple[bool, bool, bool]:
        adapted = Adapted(world, *args, layout=layout)
        (plain,) = Policy(adapted.megatron).chunks
        plain.requires_grad_(False)  # as a reference is held; Megatron multiplies by trained weights in another order
        groups = make_groups()
        on = adapted.logprobs(groups)
        with lora.adapters_off(adapted.chunks):
            off = adapted.logprobs(groups)
        again, adapted.model = adapted.logprobs(groups), plain
        return torch.equal(off, adapted.logprobs(groups)), torch.equal(on, off), torch.equal(on, again)

    _, adapter = peft_model("qwen3", TARGETS)
    assert launch(layout.size, compare, tiny("qwen3"), TARGETS, adapter) == [(True, False, True)] * layout.size


@in_layouts
@pytest.mark.parametrize(("kind", "targets"), CHOICES)
def test_merged_weights_are_those_of_peft(
    launch: Any, tiny: Any, peft_model: Any, kind: str, targets: Any, layout: Layout
) -> None:
    @on_platform()
    def export(*args: Any) -> Tensors:
        adapted = Adapted(*args, layout=layout)
        return {name: tensor.numpy() for name, tensor in adapted.policy.tensors()}

    model, adapter = peft_model(kind, targets)
    found = launch(layout.size, export, tiny(kind), targets, adapter)[0]
    wanted = model.merge_and_unload().state_dict()
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        np.testing.assert_allclose(found[name], weight.numpy(), rtol=0, atol=1e-6)


def test_every_layout_starts_alike_and_from_the_base_model(launch: Any, tiny: Any, make_groups: Any) -> None:
    @on_platform()
    def start(*args: Any, layout: Layout) -> tuple[Tensors, bool]:
        adapted = Adapted(*args, layout=layout, seed=5)
        on = adapted.logprobs(make_groups())
        with lora.adapters_off(adapted.chunks):
            return adapted.tensors(), torch.equal(on, adapted.logprobs(make_groups()))

    ((one, same),) = launch(1, lambda *a: start(*a, layout=ONE), tiny("llama"), TARGETS)
    (two, same_too), _ = launch(2, lambda *a: start(*a, layout=Layout(tp=2)), tiny("llama"), TARGETS)
    assert same
    assert same_too
    assert all(np.array_equal(one[name], two[name]) for name in one)
    for name, tensor in one.items():
        bound = 1 / math.sqrt(tensor.shape[1]) if name.endswith("lora_A") else 0.0  # Kaiming uniform with a = sqrt(5)
        assert 0.9 * bound <= np.abs(tensor).max() <= bound
    assert len({tensor.sum() for name, tensor in one.items() if name.endswith("lora_A")}) == len(one) // 2


@in_layouts
def test_dropout_is_for_training_only(
    launch: Any, tiny: Any, make_groups: Any, peft_model: Any, layout: Layout
) -> None:
    _, adapter = peft_model("qwen2", TARGETS)
    run = [tiny("qwen2"), TARGETS, adapter]
    plain = launch(layout.size, lambda *a: scored(*a, groups=make_groups(), layout=layout), *run)
    scoring = launch(layout.size, lambda *a: scored(*a, groups=make_groups(), layout=layout, dropout=0.5), *run)
    training = launch(
        layout.size, lambda *a: scored(*a, groups=make_groups(), layout=layout, dropout=0.5, training=True), *run
    )
    assert np.array_equal(scoring[0], plain[0])
    assert not np.array_equal(training[0], plain[0])


def test_dropout_keeps_the_copies_of_an_adapter_alike(
    launch: Any, tiny: Any, make_groups: Any, peft_model: Any
) -> None:
    @on_platform()
    def copies(*args: Any) -> Tensors:
        adapted = Adapted(*args, layout=Layout(tp=2), dropout=0.5)
        adapted.gradients(make_groups())
        named = adapted.model.named_parameters()
        return {n: p.main_grad.numpy() for n, p in named if p.requires_grad and not p.tensor_model_parallel}

    _, adapter = peft_model("qwen2", TARGETS)
    first, second = launch(2, copies, tiny("qwen2"), TARGETS, adapter)
    assert len(first) == 2 * len(TARGETS)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"target_modules": ["q_proj"]}, r"it adapts \['q_proj'\], the settings \['down_proj'"),
        ({"r": 2}, "its r is 2, the settings say 4"),
        ({"use_rslora": True}, "use_rslora=True is not supported"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    launch: Any, tiny: Any, hf_model: Any, tmp_path: Path, saved: dict[str, Any], message: str
) -> None:
    import peft

    values = {"r": 4, "lora_alpha": 6, "target_modules": list(TARGETS), **saved}
    peft.get_peft_model(hf_model(tiny("llama")), peft.LoraConfig(**values)).save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match=message):
        launch(1, lambda *a: scored(*a, groups=[]), tiny("llama"), TARGETS, tmp_path)


def test_half_of_the_experts_gate_and_up_has_no_peft_form(tiny: Any, tmp_path: Path) -> None:
    experts = hf_config.Experts(num=4, top_k=2, ffn_size=8, normalised=True)
    config = dataclasses.replace(hf_config.read(tiny("llama")), experts=experts)
    with pytest.raises(ValueError, match=r"up_proj alone has no form in PEFT.*take the merged weights"):
        lora.export_adapter(tmp_path, [], Lora(target_modules=("up_proj", "down_proj")), config)
