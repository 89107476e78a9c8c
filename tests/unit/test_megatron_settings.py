"""Settings of ActorUpdate and RefLogprob: what is refused, and in which words; how the actor is wired."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import Stream
from rollstream.stages.errors import ConfigError, WiringError
from rollstream.stages.logprob import RefLogprob
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
        ({"dtype": "float16"}, "dtype must be one of the known, got 'float16'"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, got 1.0"),
        ({"clip_low": 1.5}, "clip_low must be between 0 and 1, got 1.5"),
        ({"betas": (0.9, 1.0)}, "betas must be from 0 to below 1"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"max_mismatch": 0.0}, "max_mismatch must be above 0, got 0.0"),
        ({"kl_coef": float("nan")}, "kl_coef must be 0 or above, got nan"),
        ({"dp": 5}, "dp=5 must not be above groups_per_step=4"),
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
        config(lr=-1.0, tp=0, kl="k9")
    assert len(error.value.faults) == 4  # min_lr is above such an lr, too


def test_ref_logprob_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="3 faults"):
        RefLogprob.Config(model="", temperature=0.0, dtype="half")


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(
        WiringError, match=r"kl_coef=0.01 needs ref=: wire RefLogprob\(...\)\(rollouts\) or set kl_coef=0"
    ):
        ActorUpdate(config(kl_coef=0.01))(stream(Advantaged))


def test_reference_without_kl_is_allowed() -> None:
    update = ActorUpdate(config())(stream(Advantaged), ref=stream(WithRef))
    assert set(update.inputs) == {"stream", "ref"}


@pytest.mark.parametrize(("main", "ref"), [(Scored, WithRef), (Advantaged, Rollouts)])
def test_wrong_streams_are_refused(main: type, ref: type) -> None:
    with pytest.raises(WiringError, match="which lacks"):
        ActorUpdate(config())(stream(main), ref=stream(ref))


def test_wiring_survives_pickling() -> None:
    actor = ActorUpdate(config(tp=2, dp=2))
    actor(stream(Advantaged), ref=stream(WithRef))
    copy = pickle.loads(pickle.dumps(actor))
    assert (copy.has_ref, copy.num_ranks, copy.data_parallel_size, copy.config) == (True, 4, 2, actor.config)


def test_a_folder_that_holds_no_model_is_a_fault(tmp_path: Any) -> None:
    (fault,) = ActorUpdate(config(model=str(tmp_path))).faults()
    assert "has no config.json" in fault
