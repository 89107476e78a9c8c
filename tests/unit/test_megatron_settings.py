"""Settings of ActorUpdate and RefLogprob: what is refused, and in which words; how the actor is wired."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import Stream
from rollstream.stages.errors import ConfigError, WiringError
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.megatron.layout import Layout
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.settings import DECIDED_ELSEWHERE, known_transformer_fields
from rollstream.stages.schema import Advantaged, Rollouts, Scored, WithRef


def config(**changes: Any) -> ActorUpdate.Config:
    return ActorUpdate.Config(**{"model": "m", "groups_per_step": 4, **changes})


def stream(schema: type) -> Stream[Any]:
    return Stream(RefLogprob(RefLogprob.Config(model="m")), schema, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0, got 0.0"),
        ({"min_lr": 1.0}, "min_lr must not be above lr=1e-06, got 1.0"),
        ({"decay": "linear", "warmup_steps": 5, "decay_steps": 5}, "needs decay_steps above warmup_steps=5, got 5"),
        ({"decay": "linar"}, "did you mean 'linear'"),
        ({"kl": "k4"}, "Known: k1, k1+, k2, k3, k3"),
        ({"aggregation": "token_mean"}, "did you mean 'token-mean'"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "needs max_response_tokens of at least 1, got None"),
        ({"old_logprobs": "engine"}, "old_logprobs must be one of the known, got 'engine'"),
        (
            {"correction": Correction(kind="tis"), "old_logprobs": "rollout"},
            "correction='tis' needs old_logprobs='trainer', got 'rollout'",
        ),
        ({"dtype": "half"}, "dtype must be one of the known, got 'half'"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch must be at least 1, got 0"),
        (
            {"override_transformer_config": {"recompute_granularty": "full"}},
            "TransformerConfig has no field 'recompute_granularty'. did you mean 'recompute_granularity'?",
        ),
        (
            {"override_transformer_config": {"tensor_model_parallel_size": 2}},
            "tensor_model_parallel_size is decided by layout: leave it out",
        ),
        ({"recompute": "ful"}, "recompute must be one of the known, got 'ful': did you mean 'full'?"),
        ({"offload": ("params",)}, "offload must name what is known, got 'params'"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, got 1.0"),
        ({"clip_low": 1.5}, "clip_low must be between 0 and 1, got 1.5"),
        ({"betas": (0.9, 1.0)}, "betas must be from 0 to below 1"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"max_mismatch": 0.0}, "max_mismatch must be above 0, got 0.0"),
        ({"kl_coef": float("nan")}, "kl_coef must be 0 or above, got nan"),
        ({"layout": Layout(dp=5)}, "dp=5 must not be above groups_per_step=4"),
        ({"model": ""}, "model must name a folder"),
    ],
)
def test_wrong_setting_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**changes)
    (fault,) = error.value.faults
    assert message in fault


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        config(lr=-1.0, micro_batch_size=0, kl="k9")
    assert len(error.value.faults) == 4  # min_lr is above such an lr, too


def test_ref_logprob_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="3 faults"):
        RefLogprob.Config(model="", temperature=0.0, dtype="half")


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(
        WiringError, match=r"kl_coef=0.01 needs ref=: wire RefLogprob\(...\)\(rollouts\), train adapters \(lora\)"
    ):
        ActorUpdate(config(kl_coef=0.01))(stream(Advantaged))


def test_adapters_need_no_reference() -> None:
    update = ActorUpdate(config(kl_coef=0.01, lora=Lora()))(stream(Advantaged))
    assert set(update.inputs) == {"stream"}


def test_fields_of_megatrons_config_are_those_of_the_class() -> None:
    from rollstream.stages.megatron.mcore import TransformerConfig

    assert known_transformer_fields() == {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(DECIDED_ELSEWHERE) <= known_transformer_fields()


def test_a_reference_has_no_shares() -> None:
    with pytest.raises(ConfigError, match="dp of a reference must be 1, got 2: give replicas instead"):
        RefLogprob.Config(model="m", layout=Layout(dp=2))


def test_reference_without_kl_is_allowed() -> None:
    update = ActorUpdate(config())(stream(Advantaged), ref=stream(WithRef))
    assert set(update.inputs) == {"stream", "ref"}


@pytest.mark.parametrize(("main", "ref"), [(Scored, WithRef), (Advantaged, Rollouts)])
def test_wrong_streams_are_refused(main: type, ref: type) -> None:
    with pytest.raises(WiringError, match="which lacks"):
        ActorUpdate(config())(stream(main), ref=stream(ref))


def test_wiring_survives_pickling() -> None:
    actor = ActorUpdate(config(layout=Layout(tp=2, dp=2)))
    actor(stream(Advantaged), ref=stream(WithRef))
    copy = pickle.loads(pickle.dumps(actor))
    assert (copy.has_ref, copy.num_ranks, copy.data_parallel_size, copy.config) == (True, 4, 2, actor.config)


def test_a_folder_that_holds_no_model_is_a_fault(tmp_path: Any) -> None:
    (fault,) = ActorUpdate(config(model=str(tmp_path))).faults()
    assert "has no config.json" in fault
