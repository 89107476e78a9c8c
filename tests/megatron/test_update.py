"""What an update does to the weights, and what it reports."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from small_updates import distance, replaced, summed, update

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.moe_settings import Moe

pytestmark = pytest.mark.megatron


@pytest.fixture
def source(tiny: Any, hf_model: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in hf_model(tiny("qwen2")).state_dict().items()}


def test_a_step_moves_every_weight(launch: Any, tiny: Any, make_groups: Any, source: Any) -> None:
    ((_, weights),) = launch(1, update, tiny("qwen2"), [make_groups()])
    assert set(weights) == set(source)
    assert all(not np.array_equal(weights[name], source[name]) for name in source if "k_proj.bias" not in name)


def test_weights_put_out_stay_as_they_were(launch: Any, tiny: Any, make_groups: Any, source: Any) -> None:
    def before_a_step(world: World) -> dict[str, np.ndarray]:
        config = ActorUpdate.Config(model=str(tiny("qwen2")), groups_per_step=4, max_mismatch=None)
        stage = ActorUpdate(config)
        stage.setup(world)
        weights = dict(stage.weights())
        stage.update(make_groups())
        return weights

    assert distance(launch(1, before_a_step)[0], source) == 0.0


def test_ratio_is_exactly_1_with_one_step_a_batch(launch: Any, tiny: Any, make_groups: Any) -> None:
    ((steps, _),) = launch(1, update, tiny("qwen2"), [make_groups()])
    total, count = steps[0]["actor/ratio"]
    assert total == count == steps[0]["actor/tokens"][0]
    assert steps[0]["actor/kl"][0] == 0.0


def test_old_logprobs_are_taken_before_the_first_of_several_steps(launch: Any, tiny: Any, make_groups: Any) -> None:
    ((steps, _),) = launch(1, lambda *a: update(*a, epochs=2), tiny("qwen2"), [make_groups()])
    total, count = steps[0]["actor/ratio"]
    assert steps[0]["actor/loss"][1] == 2
    assert total != count
    assert steps[0]["actor/kl"][0] != 0.0


def test_mini_batches_make_one_optimizer_step_each(launch: Any, tiny: Any, make_groups: Any) -> None:
    ranks = launch(2, lambda *a: update(*a, layout=Layout(dp=2), mini_batches=3), tiny("qwen2"), [make_groups()])
    metrics = summed(ranks)
    assert ranks[0][0][0]["actor/loss"][1] == 3
    assert math.isfinite(metrics["actor/grad_norm"])


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)])
def test_layout_changes_neither_weights_nor_metrics(launch: Any, tiny: Any, make_groups: Any, layout: Layout) -> None:
    steps = [make_groups(seed=1), make_groups(seed=2)]
    one = launch(1, update, tiny("qwen2"), steps)
    two = launch(2, lambda *a: update(*a, layout=layout), tiny("qwen2"), steps)
    assert summed(two) == pytest.approx(summed(one), rel=1e-5, abs=1e-6)
    assert two[0][0][1]["actor/loss"][0] == pytest.approx(one[0][0][1]["actor/loss"][0], abs=1e-5)


def test_empty_share_equals_one_rank(launch: Any, tiny: Any, make_groups: Any) -> None:
    one = launch(1, update, tiny("qwen2"), [make_groups()])
    two = launch(2, lambda *a: update(*a, True, layout=Layout(dp=2)), tiny("qwen2"), [make_groups()])
    padding = summed(two).pop("actor/padding")
    assert padding > 0  # the empty share runs one token
    assert summed(two) == pytest.approx(summed(one) | {"actor/padding": padding}, rel=1e-5, abs=1e-6)
    assert distance(two[0][1], one[0][1]) <= 1e-5


def test_ranks_run_as_many_micro_batches(launch: Any, tiny: Any, make_groups: Any) -> None:
    def count(world: World) -> int:
        config = ActorUpdate.Config(
            model=str(tiny("llama")), groups_per_step=4, layout=Layout(dp=2), micro_batch_size=2, max_mismatch=None
        )
        stage = ActorUpdate(config)
        stage.setup(world)
        run, seen = stage.session._trainer.forward_backward, []
        stage.session._trainer.forward_backward = lambda batches, loss: (seen.append(len(batches)), run(batches, loss))[
            1
        ]
        stage.update(make_groups()[: 3 - world.rank * 2])
        return seen[0]

    assert launch(2, count) == [5, 5]


def test_batch_without_a_trained_token_changes_nothing(launch: Any, tiny: Any, make_groups: Any, source: Any) -> None:
    groups = [
        replaced(group, "loss_mask", [[False] * len(row) for row in group.column("loss_mask").to_pylist()])
        for group in make_groups()
    ]
    ((steps, weights),) = launch(1, update, tiny("qwen2"), [groups])
    assert steps[0]["actor/skipped_steps"] == (1.0, 1.0)
    assert distance(weights, source) == 0.0


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2)])
def test_nan_advantage_skips_the_step_on_all_ranks(
    launch: Any, tiny: Any, make_groups: Any, source: Any, layout: Layout
) -> None:
    groups = make_groups()
    poisoned = [[math.nan] * len(row) for row in groups[1].column("advantages").to_pylist()]
    bad = [groups[0], replaced(groups[1], "advantages", poisoned), *groups[2:]]
    ranks = launch(layout.size, lambda *a: update(*a, layout=layout), tiny("qwen2"), [bad])
    assert summed(ranks)["actor/skipped_steps"] == 1.0
    assert distance(ranks[0][1], source) == 0.0


@pytest.mark.parametrize("advantage", [math.inf, 1e30], ids=["loss not finite", "gradient norm overflows"])
def test_skipped_step_leaves_no_trace(launch: Any, tiny: Any, make_groups: Any, advantage: float) -> None:
    groups = make_groups()
    values = [[advantage] * len(row) for row in groups[1].column("advantages").to_pylist()]
    bad = [groups[0], replaced(groups[1], "advantages", values), *groups[2:]]
    ((steps, after),) = launch(1, update, tiny("qwen2"), [bad, groups])
    ((_, without),) = launch(1, update, tiny("qwen2"), [groups])
    assert [step["actor/skipped_steps"][0] for step in steps] == [1.0, 0.0]
    assert "actor/grad_norm" not in steps[0]
    assert distance(after, without) == 0.0  # Adam's moments and step count are as new


def test_loss_that_is_not_finite_skips_the_step(launch: Any, tiny: Any, make_groups: Any, source: Any) -> None:
    def poisoned(world: World) -> tuple[Any, dict[str, np.ndarray]]:
        stage = ActorUpdate(ActorUpdate.Config(model=str(tiny("qwen2")), groups_per_step=4, max_mismatch=None))
        stage.setup(world)
        trainer = stage.session._trainer
        run = trainer.forward_backward
        trainer.forward_backward = lambda *a: [dataclasses.replace(report, loss=math.nan) for report in run(*a)]
        return stage.update(make_groups())["actor/skipped_steps"], dict(stage.weights())

    ((skipped, weights),) = launch(1, poisoned)
    assert skipped == (1.0, 1.0)
    assert distance(weights, source) == 0.0


def test_masked_slots_may_hold_anything(launch: Any, tiny: Any, make_groups: Any) -> None:
    def filled(group: pa.RecordBatch) -> pa.RecordBatch:
        masks = group.column("loss_mask").to_pylist()
        for column, junk in (("advantages", math.nan), ("rollout_logprobs", 1e4), ("ref_logprobs", -math.inf)):
            rows = zip(masks, group.column(column).to_pylist(), strict=True)
            values = [[v if m else junk for m, v in zip(mask, row, strict=True)] for mask, row in rows]
            group = replaced(group, column, values)
        return group

    settings = {"kl_coef": 0.1, "old_logprobs": "rollout"}
    ((_, clean),) = launch(1, lambda *a: update(*a, **settings), tiny("qwen2"), [make_groups()])
    filled_groups = [filled(group) for group in make_groups()]
    ((_, junk),) = launch(1, lambda *a: update(*a, **settings), tiny("qwen2"), [filled_groups])
    assert distance(junk, clean) == 0.0


def test_mismatch_gate_stops_before_the_first_step(launch: Any, tiny: Any, make_groups: Any) -> None:
    with pytest.raises(AssertionError, match=r"mean \|trainer - rollout\|.*max_mismatch=0.05.*weights are unchanged"):
        launch(2, lambda *a: update(*a, max_mismatch=0.05, layout=Layout(dp=2)), tiny("qwen2"), [make_groups()])


@pytest.fixture
def on_policy(tiny: Any, hf_model: Any, hf_logprobs: Any) -> Any:
    """on_policy(groups): with the log-probabilities of the model before any step as the rollout's."""

    def make(groups: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        model = hf_model(tiny("qwen2"))
        return [
            replaced(
                group,
                "rollout_logprobs",
                [hf_logprobs(model, r["prompt_ids"], r["response_ids"]).tolist() for r in group.to_pylist()],
            )
            for group in groups
        ]

    return make


def test_mismatch_gate_looks_at_the_first_step_only(
    launch: Any, tiny: Any, make_groups: Any, on_policy: Any, source: Any
) -> None:
    settings = {"max_mismatch": 0.05, "correction": Correction(kind="tis"), "mini_batches": 2}
    steps = [on_policy(make_groups()), make_groups()]  # the second one's samples are far from any policy of ours
    ((metrics, weights),) = launch(1, lambda *a: update(*a, **settings), tiny("qwen2"), steps)
    differences = [step["rollout/logprob_diff"] for step in metrics]
    assert differences[0][0] / differences[0][1] < 1e-5
    assert differences[1][0] / differences[1][1] > 0.5
    assert distance(weights, source) > 0


def test_mismatch_gate_waits_for_a_token_to_compare(launch: Any, tiny: Any, make_groups: Any) -> None:
    nothing = [
        replaced(group, "loss_mask", [[False] * len(row) for row in group.column("loss_mask").to_pylist()])
        for group in make_groups()
    ]
    with pytest.raises(AssertionError, match="before the first step"):
        launch(1, lambda *a: update(*a, max_mismatch=0.05), tiny("qwen2"), [nothing, make_groups()])


def mismatch_of(groups: list[pa.RecordBatch], prox: list[np.ndarray]) -> dict[str, float]:
    """The rollout metrics by numpy, of groups whose rows have the log-probabilities `prox` before the update."""
    rows = [row for group in groups for row in group.to_pylist()]
    masks = [np.array(row["loss_mask"], bool) for row in rows]
    d = np.concatenate([(p - row["rollout_logprobs"])[m] for p, row, m in zip(prox, rows, masks, strict=True)])
    ratio = np.exp(d.astype(np.float64))
    weight = np.minimum(ratio, 2.0)
    return {
        "rollout/logprob_diff": np.abs(d).mean(),
        "rollout/mismatch_kl": -d.mean(),
        "rollout/mismatch_k3": (ratio - 1 - d).mean(),
        "rollout/ratio_max": ratio.max(),
        "rollout/ratio_min": ratio.min(),
        "rollout/weight": weight.mean(),
        "rollout/weight_cut": (ratio > 2).mean(),
        "rollout/ess": weight.sum() ** 2 / np.square(weight).sum() / len(weight),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epochs": 2},
        {"layout": Layout(dp=2), "micro_batch_size": 2},
        {"layout": Layout(pp=2), "max_tokens_per_micro_batch": 60},
        {"layout": Layout(tp=2)},
    ],
    ids=["one rank", "epochs", "dp2", "pp2", "tp2"],
)
def test_mismatch_is_that_of_all_tokens_once(
    launch: Any, tiny: Any, make_groups: Any, hf_model: Any, hf_logprobs: Any, settings: dict[str, Any]
) -> None:
    model, groups = hf_model(tiny("qwen2")), make_groups()
    rows = [row for group in groups for row in group.to_pylist()]
    prox = [hf_logprobs(model, row["prompt_ids"], row["response_ids"]).detach().numpy() for row in rows]
    size = settings.get("layout", Layout()).size
    ranks = launch(size, lambda *a: update(*a, correction=Correction(kind="tis"), **settings), tiny("qwen2"), [groups])
    found, wanted = summed(ranks), mismatch_of(groups, prox)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    num_tokens = sum(sum(row["loss_mask"]) for row in rows)
    for name in ("rollout/weight", "rollout/ess"):
        assert sum(steps[0].get(name, (0.0, 0.0))[1] for steps, _ in ranks) == num_tokens


def test_mismatch_is_reported_without_a_correction(launch: Any, tiny: Any, make_groups: Any) -> None:
    def names(**settings: Any) -> set[str]:
        ((steps, _),) = launch(1, lambda *a: update(*a, **settings), tiny("qwen2"), [make_groups()])
        return {name for name in steps[0] if name.startswith("rollout/")}

    corrected = names(correction=Correction(kind="seq-mask"))
    assert len(corrected) == 8
    assert names() == names(old_logprobs="rollout", mini_batches=2) == corrected


def test_nothing_is_learnt_where_every_token_is_rejected(launch: Any, tiny: Any, make_groups: Any, source: Any) -> None:
    far = [
        replaced(group, "rollout_logprobs", [[-90.0] * len(row) for row in group.column("loss_mask").to_pylist()])
        for group in make_groups()
    ]
    ((steps, weights),) = launch(1, lambda *a: update(*a, correction=Correction(kind="mask")), tiny("qwen2"), [far])
    assert steps[0]["actor/loss"] == (0.0, 1.0)
    assert steps[0]["rollout/ess"][0] == 0.0
    assert steps[0]["rollout/weight_cut"][0] == steps[0]["actor/tokens"][0]
    assert distance(weights, source) == 0.0


def test_warm_up_wastes_no_step(launch: Any, tiny: Any, make_groups: Any) -> None:
    settings = {"lr": 1e-3, "warmup_steps": 1, "decay": "linear", "decay_steps": 3, "min_lr": 1e-4}
    ((steps, _),) = launch(1, lambda *a: update(*a, **settings), tiny("qwen2"), [make_groups()] * 4)
    assert [step["actor/lr"][0] for step in steps] == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=["tp2", "pp2"])
def test_half_precision_trains_as_float32_does(
    launch: Any, tiny: Any, make_groups: Any, source: Any, dtype: str, layout: Layout
) -> None:
    settings = {"lr": 1e-4, "layout": layout}
    half = launch(2, lambda *a: update(*a, dtype=dtype, **settings), tiny("qwen2"), [make_groups()] * 3)
    full = launch(2, lambda *a: update(*a, **settings), tiny("qwen2"), [make_groups()] * 3)
    assert 0 < distance(half[0][1], source) < 0.1
    losses = [[step["actor/loss"][0] for step in ranks[0][0]] for ranks in (half, full)]
    assert losses[0] == pytest.approx(losses[1], abs=3e-3)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_float16_halves_its_scale_where_gradients_overflow(launch: Any, tiny: Any, make_groups: Any, kind: str) -> None:
    big = [[1e5] * len(row) for row in make_groups()[1].column("advantages").to_pylist()]
    bad = [make_groups()[0], replaced(make_groups()[1], "advantages", big)]
    steps = [bad] * 3 + [make_groups()]
    ((metrics, weights),) = launch(1, lambda *a: update(*a, dtype="float16"), tiny(kind), steps)
    assert [step["actor/skipped_steps"][0] for step in metrics] == [1.0, 1.0, 1.0, 0.0]
    assert metrics[-1]["actor/loss_scale"][0] < 2.0**16
    ((_, without),) = launch(1, lambda *a: update(*a, dtype="float16"), tiny(kind), [make_groups()])
    assert distance(weights, without) < 1e-5


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, sp=True, pp=2)], ids=["pp2", "tp2 sp pp2"])
def test_nothing_is_trained_and_nothing_hangs_where_all_is_masked(
    launch: Any, tiny: Any, make_groups: Any, source: Any, layout: Layout
) -> None:
    groups = [
        replaced(group, "loss_mask", [[False] * len(row) for row in group.column("loss_mask").to_pylist()])
        for group in make_groups()
    ]
    ranks = launch(layout.size, lambda *a: update(*a, layout=layout), tiny("qwen2"), [groups])
    assert summed(ranks)["actor/skipped_steps"] == 1.0
    assert distance(ranks[0][1], source) == 0.0


MOE_SETTINGS: dict[str, Any] = {"moe": Moe(aux_loss_coef=0.3, z_loss_coef=0.05), "lr": 1e-4}


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 5},
        {"max_tokens_per_micro_batch": 60},
        {"layout": Layout(dp=2)},
        {"layout": Layout(dp=2, ep=2), "micro_batch_size": 2},
        {"layout": Layout(tp=2, sp=True)},
        {"layout": Layout(tp=2, sp=True, ep=2, etp=1), "micro_batch_size": 1},
        {"layout": Layout(pp=2), "micro_batch_size": 2},
    ],
    ids=lambda settings: " ".join(f"{k}={v}" for k, v in settings.items() if k != "layout") or None,
)
def test_losses_of_routers_do_not_depend_on_the_cut(
    launch: Any, tiny: Any, make_groups: Any, settings: dict[str, Any]
) -> None:
    steps = [make_groups(seed=1), make_groups(seed=2)]
    one = launch(1, lambda *a: update(*a, **MOE_SETTINGS), tiny("qwen3_moe"), steps)
    size = settings.get("layout", Layout()).size
    cut = launch(size, lambda *a: update(*a, **MOE_SETTINGS, **settings), tiny("qwen3_moe"), steps)
    ours, wanted = summed(cut), summed(one)
    names = [name for name in wanted if name.startswith("moe/")] + ["actor/grad_norm", "actor/loss"]
    assert {name: ours[name] for name in names} == pytest.approx({n: wanted[n] for n in names}, rel=1e-5, abs=1e-6)
    assert wanted["moe/load_max"] >= 1.0
    assert distance(cut[0][1], one[0][1]) <= 2e-5


def test_losses_of_routers_move_the_weights(launch: Any, tiny: Any, make_groups: Any) -> None:
    with_losses = launch(1, lambda *a: update(*a, **MOE_SETTINGS), tiny("mixtral"), [make_groups()])
    without = launch(1, lambda *a: update(*a, lr=1e-4), tiny("mixtral"), [make_groups()])
    assert distance(with_losses[0][1], without[0][1]) > 1e-5
    assert with_losses[0][0][0]["actor/grad_norm"] != without[0][0][0]["actor/grad_norm"]


def test_megatrons_own_settings_reach_it(launch: Any, tiny: Any, make_groups: Any) -> None:
    def recompute(world: World) -> Any:
        override = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
        settings = {"override_transformer_config": override, "groups_per_step": 4, "max_mismatch": None}
        stage = ActorUpdate(ActorUpdate.Config(model=str(tiny("llama")), **settings))
        stage.setup(world)
        return stage.session._policy.chunks[0].config.recompute_method

    assert launch(1, recompute) == ["block"]


KINDS = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize("kinds", [KINDS, ("optimizer",), ("gradients",)], ids="+".join)
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"lora": Lora(rank=2)}], ids=str)
def test_a_rest_off_the_device_changes_nothing(
    launch: Any, tiny: Any, make_groups: Any, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    def rested(world: World, kinds: tuple[str, ...]) -> tuple[int, dict[str, np.ndarray]]:
        config = {"groups_per_step": 4, "max_mismatch": None, "lr": 1e-3, "offload": kinds, **settings}
        stage = ActorUpdate(ActorUpdate.Config(model=str(tiny("qwen2")), **config))
        stage.setup(world)
        held = [buffer.grad_data for buffer in stage.session._trainer.ddp[0].buffers]
        held += list(stage.session._policy.chunks[0].parameters())
        freed = 0
        for seed in range(3):
            stage.update(make_groups(seed=seed))
            dict(stage.weights())
            stage.rest()
            freed = sum(not tensor.untyped_storage().nbytes() for tensor in held)
        return freed, dict(stage.weights())

    ((freed, weights),) = launch(1, rested, kinds)
    ((none, without),) = launch(1, rested, ())
    assert none == 0
    assert (freed > 0) == ("parameters" in kinds or "gradients" in kinds)
    assert distance(weights, without) == 0.0
