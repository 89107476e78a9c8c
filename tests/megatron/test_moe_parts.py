"""A model with experts, split in every way, against plain torch that runs one sequence after another."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rollstream.stages.base import Metrics, World
from rollstream.stages.megatron import parallel
from rollstream.stages.megatron.cpu_platform import on_platform
from rollstream.stages.megatron.layers import PackedAttention, RMSNorm
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    finalize_model_grads,
    get_forward_backward_func,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    state,
)
from rollstream.stages.megatron.moe import spec_with_experts
from rollstream.stages.megatron.moe_settings import Moe
from rollstream.stages.megatron.rotary import Pack, cos_sin
from rollstream.stages.megatron.router import routers_of, run_with, take_metrics
from rollstream.stages.megatron.router_context import pack_context

pytestmark = pytest.mark.megatron

HIDDEN, FFN, VOCAB, EXPERTS, TOP_K, LAYERS = 32, 16, 64, 4, 2, 2
SHAPE: dict[str, Any] = {
    **{"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_query_groups": 2},
    **{"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_ffn_hidden_size": FFN, "ffn_hidden_size": FFN},
    **{"moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none", "add_bias_linear": False},
    **{"gated_linear_unit": True, "activation_func": F.silu, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    **{"gradient_accumulation_fusion": False, "pipeline_dtype": torch.float32},
}
LENGTHS = (5, 9, 3, 12, 7, 1, 8, 6)
LOSSES = Moe(aux_loss_coef=0.5, z_loss_coef=0.05)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FREED = {"deallocate_pipeline_outputs": True}  # a pipeline stage frees what it has sent on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """How a step over all sequences is run."""

    layout: Layout = dataclasses.field(default_factory=Layout)
    #: Of each data-parallel rank.
    num_micro_batches: int = 2
    settings: Moe | None = LOSSES
    #: Tokens of filler behind each pack, and more where the layout needs them.
    num_filler: int = 0
    scale: float = 1.0  # of the loss, as float16 has one
    #: [all tokens, layers, k]
    routes: np.ndarray | None = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def random(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


TOKENS = [(random(f"ids{i}", n).abs() * 40).long() % VOCAB for i, n in enumerate(LENGTHS)]
#: The loss of a step is the mean over tokens of the logits times these.
GRADIENTS = [random(f"gradients{i}", n, VOCAB) for i, n in enumerate(LENGTHS)]
STARTS = np.cumsum([0, *LENGTHS])


def build(layout: Layout, **more: Any) -> GPTModel:
    config = TransformerConfig(
        **SHAPE,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        **{"moe_token_dispatcher_type": "alltoall", "variable_seq_lengths": layout.pp > 1, **more},
    )
    layer = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    spec_with_experts(layer)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=norm),  # type: ignore[arg-type]
        **{"vocab_size": VOCAB, "max_sequence_length": 64, "position_embedding_type": "none"},
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
    )
    with torch.no_grad():
        for name, local, parameter in parameters(model, layout):
            full = [n * k for n, k in zip(parameter.shape, split_of(name, layout), strict=True)]
            weight = 1 + 0.1 * random(name, *full) if parameter.dim() == 1 else 0.3 * random(name, *full)
            parameter.copy_(local(weight))
    return model


def split_of(name: str, layout: Layout) -> tuple[int, ...]:
    """How many parts each axis of a parameter is cut into."""
    if "layernorm" in name:
        return (1,)
    if "router" in name:
        return (1, 1)
    size = layout.expert_tp if "experts" in name else layout.tp
    return (1, size) if "linear_fc2" in name or "linear_proj" in name else (size, 1)


def parameters(model: GPTModel, layout: Layout) -> Iterator[tuple[str, Any, torch.nn.Parameter]]:
    """(name in the whole model, from a whole tensor to this rank's part, parameter)."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[1] == "layers":
            layer: Any = model.decoder.layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if "local_experts" in parts:
                parts[6] = str(layer.mlp.local_expert_indices[int(parts[6])])

        def local(full: torch.Tensor, name: str = name) -> torch.Tensor:
            dense = "experts" not in name
            group = state.get_tensor_model_parallel_group() if dense else state.get_expert_tensor_parallel_group()
            sizes = split_of(name, layout)
            if max(sizes) == 1:
                return full
            halves = full.chunk(2 if "linear_fc1" in name else 1)
            return torch.cat([half.chunk(group.size(), sizes.index(max(sizes)))[group.rank()] for half in halves])

        yield ".".join(parts), local, parameter


def pack(sequences: Sequence[int], num_filler: int) -> tuple[Any, ...]:
    """(ids, positions, packed parameters, gradients) of these sequences with filler behind them."""
    sizes = [*(LENGTHS[i] for i in sequences), *([num_filler] if num_filler else [])]
    ids = torch.cat([*(TOKENS[i] for i in sequences), torch.full((num_filler,), 7)])[None]
    bounds = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
    positions, longest = torch.cat([torch.arange(n) for n in sizes]), max(sizes)
    packed = Pack("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    packed.rotary = cos_sin(positions, torch.ones(HIDDEN // 8))
    gradients = torch.cat([*(GRADIENTS[i] for i in sequences), torch.zeros(num_filler, VOCAB)])
    return ids, positions[None], packed, gradients / sum(LENGTHS)


def batch(step: Step, sequences: Sequence[int], factor: float) -> tuple[Any, ...]:
    """What `pack` gives, and the context for the routers."""
    lengths, routes = [LENGTHS[i] for i in sequences], step.routes
    filler = step.num_filler + -(sum(lengths) + step.num_filler) % step.layout.tp
    if step.settings is None:
        return *pack(sequences, filler), None
    if routes is not None:
        routes = torch.from_numpy(np.concatenate([routes[STARTS[i] : STARTS[i + 1]] for i in sequences]))
    more: dict[str, Any] = {"factor": factor, "settings": step.settings, "num_step_tokens": sum(LENGTHS)}
    return *pack(sequences, filler), pack_context(lengths, num_filler=filler, routes=routes, **more)


@on_platform()
def run(world: World, step: Step, wanted: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    """One step as a trainer runs it. Of this rank: metrics, logits, gradients, how far these are from the wanted."""
    layout = step.layout
    parallel.init(world, layout, 1)
    model = build(layout, **step.more)
    model.config.finalize_model_grads_func = finalize_model_grads
    if step.scale != 1.0:
        model.config.grad_scale_func = lambda loss: loss * step.scale
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    dp, share = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    factor = step.num_micro_batches * dp
    packs = np.array_split(np.arange(len(LENGTHS)), factor)[share::dp]
    routers, logits = routers_of(model), list[np.ndarray]()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        ids, positions, packed, gradients, context = next(iterator)
        mine = gradients.chunk(layout.tp, 1)[state.get_tensor_model_parallel_rank()]

        def loss(out: torch.Tensor) -> Any:
            logits.append(out.detach().view(mine.shape).numpy().copy())
            return (out.view(mine.shape) * mine).sum() * factor, torch.ones((), dtype=torch.int), {}

        return run_with(context, routers, lambda: chunk(ids, positions, None, packed_seq_params=packed)), loss

    ddp.zero_grad_buffer()
    batches = iter([batch(step, pack.tolist(), factor) for pack in packs])
    sizes = {"num_microbatches": step.num_micro_batches, "seq_length": 1, "micro_batch_size": 1}
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches, model=[ddp], forward_only=False, **sizes
    )
    found = {name: parameter.main_grad / step.scale for name, _, parameter in parameters(model, layout)}
    errors: dict[str, float] = {}
    for name, local, _ in parameters(model, layout) if wanted else ():
        part = local(torch.from_numpy(wanted[name]))
        errors[name] = float((found[name] - part).norm() / part.norm())
    gradients = {name: gradient.numpy().copy() for name, gradient in found.items()}
    return {"errors": errors, "metrics": take_metrics([model]), "logits": logits, "gradients": gradients}


class Plain:
    """Experts in plain torch, in place of a layer's forward pass; adds the layer's part to the loss of the step."""

    def __init__(self, layer: Any, settings: Moe):
        self.router, self.experts, self.settings = layer.router.weight, layer.experts.local_experts, settings
        self.loss = torch.zeros(())
        self.balance = self.size = 0.0
        self.routes: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        x = hidden[:, 0]
        logits = x @ self.router.T
        probabilities = logits.softmax(-1)
        best, chosen = probabilities.topk(TOP_K)
        out = torch.zeros_like(x)
        for token, ids in enumerate(chosen):
            for weight, expert in zip(best[token] / best[token].sum(), ids.tolist(), strict=True):
                gate, up = (self.experts[expert].linear_fc1.weight @ x[token]).chunk(2)
                out[token] += weight * (self.experts[expert].linear_fc2.weight @ (F.silu(gate) * up))
        share = torch.bincount(chosen.flatten(), minlength=EXPERTS) * EXPERTS / (TOP_K * len(x))
        balance = len(x) / sum(LENGTHS) * (share * probabilities.mean(0)).sum()
        size = (logits.exp().sum(-1).log() ** 2).sum() / sum(LENGTHS)
        self.loss = self.loss + self.settings.aux_loss_coef * balance + self.settings.z_loss_coef * size
        self.balance, self.size = self.balance + float(balance), self.size + float(size)
        self.routes.append(chosen)
        return out[:, None], None


@on_platform()
def plain(world: World, settings: Moe) -> dict[str, Any]:
    """The same step, one sequence after another, without any cut: gradients, metrics as means, routes, logits."""
    parallel.init(world, Layout(), 1)
    model = build(Layout())
    layers = [Plain(layer.mlp, settings) for layer in model.decoder.layers]
    for layer, experts in zip(model.decoder.layers, layers, strict=True):
        layer.mlp.forward = experts
    total, logits = torch.zeros(()), []
    for index in range(len(LENGTHS)):
        ids, positions, packed, gradients = pack([index], 0)
        out = model(ids, positions, None, packed_seq_params=packed).view(-1, VOCAB)
        logits.append(out.detach().numpy())
        total = total + (out * gradients).sum()
    (total + sum(layer.loss for layer in layers)).backward()
    routes = torch.stack([torch.cat(layer.routes) for layer in layers], 1)
    loads = [torch.bincount(routes[:, i].flatten(), minlength=EXPERTS) for i in range(LAYERS)]
    shares = torch.stack(loads) * EXPERTS / (TOP_K * sum(LENGTHS))
    return {
        "gradients": {name: parameter.grad.numpy() for name, parameter in model.named_parameters()},
        "metrics": {
            "moe/load_max": float(shares.amax(-1).mean()),
            "moe/load_min": float(shares.amin(-1).mean()),
            "moe/aux_loss": sum(layer.balance for layer in layers) / LAYERS,
            "moe/z_loss": sum(layer.size for layer in layers) / LAYERS,
        },
        "routes": routes.numpy(),
        "logits": np.concatenate(logits),
    }


@pytest.fixture(scope="module")
def wanted(launch: Any) -> dict[str, Any]:
    return launch(1, plain, LOSSES)[0]


def check(results: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Gradients of every rank, and the metrics of all of them together."""
    errors = [(error, name) for result in results for name, error in result["errors"].items()]
    assert {name for _, name in errors} == set(wanted["gradients"])
    assert max(errors)[0] <= 1e-5, max(errors)
    metrics = Metrics()
    for result in results:
        metrics.merge(result["metrics"])
    assert {count for _, count in metrics.sums.values()} == {LAYERS}
    assert metrics.means() == pytest.approx(wanted["metrics"], rel=1e-5)


LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp2_ep2": Layout(dp=2, ep=2),
    "tp2_etp2": Layout(tp=2, sp=True),
    "tp2_etp1": Layout(tp=2, sp=True, etp=1),
    "tp2_ep2": Layout(tp=2, sp=True, ep=2, etp=1),
    "pp2": Layout(pp=2),
}


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_micro_batches_change_nothing(launch: Any, wanted: Any, num_micro_batches: int) -> None:
    step = Step(num_micro_batches=num_micro_batches)
    check(launch(1, run, step, wanted["gradients"]), wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_changes_nothing(launch: Any, wanted: Any, name: str) -> None:
    check(launch(LAYOUTS[name].size, run, Step(layout=LAYOUTS[name]), wanted["gradients"]), wanted)


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE, FULL | FREED], ids=["full", "selective", "freed"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=["pp1", "pp2"])
def test_recomputing_changes_nothing(launch: Any, wanted: Any, layout: Layout, recompute: dict[str, Any]) -> None:
    # In a pipeline a pack is computed again after other packs have gone through.
    step = Step(layout=layout, num_micro_batches=4, more=recompute)
    check(launch(layout.size, run, step, wanted["gradients"]), wanted)


@pytest.mark.parametrize("num_filler", [1, 6])
def test_filler_changes_nothing(launch: Any, wanted: Any, num_filler: int) -> None:
    check(launch(1, run, Step(num_filler=num_filler), wanted["gradients"]), wanted)


def test_packs_of_filler_alone_change_nothing(launch: Any, wanted: Any) -> None:
    step = Step(layout=LAYOUTS["dp2_ep2"], num_micro_batches=6, num_filler=1)  # for 8 sequences
    check(launch(2, run, step, wanted["gradients"]), wanted)


def test_loss_scale_is_that_of_the_other_loss(launch: Any, wanted: Any) -> None:
    check(launch(1, run, Step(scale=1024.0), wanted["gradients"]), wanted)


def test_allgather_within_a_pack(launch: Any, wanted: Any) -> None:
    step = Step(layout=LAYOUTS["tp2_ep2"], more={"moe_token_dispatcher_type": "allgather"})
    check(launch(2, run, step, wanted["gradients"]), wanted)


def test_output_is_that_of_plain_torch(launch: Any, wanted: Any) -> None:
    (found,) = launch(1, run, Step())
    assert np.concatenate(found["logits"]) == pytest.approx(wanted["logits"], rel=1e-5, abs=1e-5)


def test_without_coefficients_nothing_is_added(launch: Any) -> None:
    (without,) = launch(1, run, Step(settings=None))
    (zero,) = launch(1, run, Step(settings=Moe()))
    assert not without["metrics"]
    assert zero["metrics"].keys() == {"moe/load_max", "moe/load_min", "moe/aux_loss", "moe/z_loss"}
    for name, gradient in without["gradients"].items():
        assert np.array_equal(zero["gradients"][name], gradient), name


@pytest.mark.parametrize("layout", [Layout(), LAYOUTS["tp2_etp2"], LAYOUTS["pp2"]], ids=["tp1", "tp2", "pp2"])
def test_replaying_own_routes_changes_nothing(launch: Any, wanted: Any, layout: Layout) -> None:
    step = Step(layout=layout, routes=wanted["routes"], more=SELECTIVE)
    check(launch(layout.size, run, step, wanted["gradients"]), wanted)


def test_replayed_routes_are_taken(launch: Any, wanted: Any) -> None:
    others = (wanted["routes"] + 1) % EXPERTS
    (own,) = launch(1, run, Step(routes=wanted["routes"]))
    (other,) = launch(1, run, Step(routes=others, num_filler=1))
    (free,) = launch(1, run, Step())
    assert all(np.array_equal(a, b) for a, b in zip(own["logits"], free["logits"], strict=True))
    assert not np.allclose(other["logits"][0][: LENGTHS[0]], own["logits"][0][: LENGTHS[0]], atol=1e-2)
    counts = np.bincount(others[:, 0].ravel()), np.bincount(others[:, 1].ravel())
    busiest = sum(c.max() * EXPERTS / c.sum() for c in counts)
    assert other["metrics"]["moe/load_max"] == pytest.approx((busiest, LAYERS))


@on_platform()
def score(world: World, routes: np.ndarray) -> tuple[list[np.ndarray], Any]:
    """Logits of all sequences in one pack, without gradients, with and without routes; and metrics left by it."""
    parallel.init(world, Layout(), 1)
    model = build(Layout())
    outs: list[np.ndarray] = []
    for given in (routes, None):
        *inputs, packed, _, context = batch(Step(routes=given), range(len(LENGTHS)), 1.0)
        forward = functools.partial(model, *inputs, None, packed_seq_params=packed)
        with torch.no_grad():
            outs.append(run_with(context, routers_of(model), forward).view(-1, VOCAB).numpy().copy())
    return outs, take_metrics([model])


def test_scoring_replays_but_counts_nothing(launch: Any, wanted: Any) -> None:
    (((replayed, free), metrics),) = launch(1, score, (wanted["routes"] + 1) % EXPERTS)
    assert not np.allclose(replayed, free, atol=1e-2)
    assert free == pytest.approx(wanted["logits"], rel=1e-5, abs=1e-5)
    assert metrics == {}


@on_platform()
def pass_twice(world: World) -> Any:
    """Metrics, and those left behind them, of one pack whose forward pass ran twice with gradients."""
    parallel.init(world, Layout(), 1)
    model = build(Layout())
    *inputs, packed, _, context = batch(Step(), range(len(LENGTHS)), 1.0)
    for _ in range(2):
        run_with(context, routers_of(model), functools.partial(model, *inputs, None, packed_seq_params=packed))
    return take_metrics([model]), take_metrics([model])


def test_a_pack_is_counted_once(launch: Any, wanted: Any) -> None:
    ((metrics, left),) = launch(1, pass_twice)
    assert Metrics(metrics).means() == pytest.approx(wanted["metrics"], rel=1e-5)
    assert left == {}
