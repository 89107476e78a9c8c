"""ActorUpdate: trains the policy on scored samples with Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rollstream.stages.base import Metric, Stream, UpdateStage, World, check_wiring
from rollstream.stages.errors import WiringError, check_rules
from rollstream.stages.loss import AGGREGATIONS, KL_KINDS
from rollstream.stages.loss.correction_settings import Correction
from rollstream.stages.megatron import hf_config
from rollstream.stages.megatron.lora_settings import Lora
from rollstream.stages.megatron.memory import trainer_memory
from rollstream.stages.megatron.settings import RECOMPUTE, MegatronConfig, shared_rules
from rollstream.stages.memory import Memory
from rollstream.stages.names import known_names
from rollstream.stages.schema import Advantaged, Trained, WithRef
from rollstream.stages.shared_weights import SharedWeights

if TYPE_CHECKING:
    from rollstream.stages.megatron.session import ActorSession

DECAYS = ("constant", "linear", "cosine")
OLD_LOGPROBS = ("trainer", "rollout")
OFFLOADS = ("parameters", "gradients", "optimizer")


class ActorUpdate(UpdateStage[Advantaged, Trained]):
    """Updates the policy by the clipped policy loss, with a KL penalty against a reference if one is wired.

        update = ActorUpdate(config)(advantaged)                # kl_coef=0
        update = ActorUpdate(config)(advantaged, ref=with_ref)

    One step makes mini_batches * epochs optimizer steps. Metrics: `actor/*`, `ref/kl` and `rollout/*`, the latter two
    over trained tokens; `actor/tokens` are those trained on, `actor/skipped_steps` optimizer steps left out because
    the loss or the gradient was not finite or no token was trained on.

    What is reported of the rollout compares its log-probabilities with the trainer's before the update: all tokens
    once; with old_logprobs="rollout" those of the first optimizer step only, for the weights move with it.
    `loss.mismatch` lists the names; `rollout/ess` is the effective sample size as a share of the tokens: 1 where the
    two agree, near 0 where a few tokens have all the weight.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronConfig):
        """Settings of the update. The model's folder also gives the tokenizer files of an export."""

        #: Groups that one step consumes.
        groups_per_step: int
        #: Largest learning rate.
        lr: float = 1e-6
        #: Learning rate at the end of the decay.
        min_lr: float = 0.0
        #: Optimizer steps before the largest learning rate; step k of them has lr * k / (warmup_steps + 1).
        warmup_steps: int = 0
        #: What follows the warm-up: constant, linear or cosine.
        decay: str = "constant"
        #: Optimizer step at which `min_lr` is reached, counted from the run's first; unused with constant.
        decay_steps: int = 0
        #: Decay rates of Adam's two moments.
        betas: tuple[float, float] = (0.9, 0.999)
        #: Adam's denominator offset.
        eps: float = 1e-8
        #: Decoupled weight decay; biases and norms are spared.
        weight_decay: float = 0.0
        #: Largest global gradient norm; 0 does not clip.
        clip_grad: float = 1.0
        #: The ratio is clipped below at 1 - clip_low.
        clip_low: float = 0.2
        #: The ratio is clipped above at 1 + clip_high.
        clip_high: float = 0.2
        #: Bound of the loss of tokens with a negative advantage, in units of it; None for none.
        dual_clip: float | None = 3.0
        #: Weight of the KL penalty; above 0 it needs `ref`, or `lora`: the model without adapters is the reference.
        kl_coef: float = 0.0
        #: KL estimator; "k3+" has the value of k3 and the gradient of k2, which is that of KL(policy || reference).
        kl: str = "k3+"
        #: How the tokens' losses become one: token-mean, seq-mean-token-mean or seq-mean-token-sum-norm.
        aggregation: str = "token-mean"
        #: Generation budget in tokens, the constant of seq-mean-token-sum-norm; unused otherwise.
        max_response_tokens: int | None = None
        #: The ratio's denominator: the trainer's log-probabilities before the update, or the rollout's own.
        old_logprobs: str = "trainer"
        #: Weights of tokens that older weights drew, or an engine that computes otherwise; needs "trainer" above.
        correction: Correction = field(default_factory=Correction)
        #: Parts that a step's samples are cut into, one optimizer step each.
        mini_batches: int = 1
        #: Passes over a step's samples.
        epochs: int = 1
        #: Train low-rank adapters in place of the model's own weights; None trains these.
        lora: Lora | None = None
        #: Activations that the backward pass makes again in place of keeping them: none, those of attention's core
        #: (selective), or all within a layer (full).
        recompute: str = "none"
        #: What leaves the device between two steps, so that other stages have its memory: parameters, gradients,
        #: optimizer. It waits in pinned host memory.
        offload: tuple[str, ...] = ()
        #: Seed of the random states.
        seed: int = 0
        #: Largest mean |trainer - rollout| log-probability at the first step of a fresh run; None does not check.
        max_mismatch: float | None = 0.05

        def __post_init__(self) -> None:
            check_rules(_rules(self))

        def transformer_fields(self) -> Mapping[str, Any]:
            return {**RECOMPUTE[self.recompute], **self.override_transformer_config}

    config: Config

    def __init__(self, config: Config, *, name: str | None = None):
        super().__init__(config, name=name)
        self.layout = config.layout
        self.has_ref = False
        self._session: ActorSession | None = None

    def __call__(self, stream: Stream[Advantaged], *, ref: Stream[WithRef] | None = None) -> Stream[Trained]:
        check_wiring(self, stream, Advantaged)
        if ref is None:
            if self.config.kl_coef > 0 and self.config.lora is None:
                raise WiringError(
                    f"kl_coef={self.config.kl_coef} needs ref=: wire RefLogprob(...)(rollouts), train adapters (lora), "
                    "whose model is its own reference, or set kl_coef=0"
                )
            return self._wire(stream=stream)
        check_wiring(self, ref, WithRef, "ref")
        self.has_ref = True
        return self._wire(stream=stream, ref=ref)

    @property
    def num_ranks(self) -> int:
        return self.layout.size

    @property
    def groups_per_step(self) -> int:
        return self.config.groups_per_step

    @property
    def data_parallel_size(self) -> int:
        return self.layout.dp

    def share_of(self, rank: int) -> int:
        return self.layout.share_of(rank)

    def faults(self) -> list[str]:
        faults, lora = self.config.model_faults(), self.config.lora
        if not faults and lora is not None and hf_config.read(Path(self.config.model)).experts is not None:
            faults += lora.expert_faults()
        return faults

    def memory(self, device_bytes: int) -> Memory:
        return trainer_memory(self.config)

    def setup(self, world: World) -> None:
        from rollstream.stages.megatron.session import ActorSession

        self._session = ActorSession(self.config, world, has_ref=self.has_ref)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    @property
    def session(self) -> ActorSession:
        """What `setup` made."""
        assert self._session is not None, "setup comes first"
        return self._session

    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        return self.session.update(groups)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """As float32, which holds every bfloat16 value exactly."""
        return self.session.weights()

    @property
    def shares_weights(self) -> bool:
        return True

    def share_weights(self, version: int) -> SharedWeights | None:
        """In the dtype of the model; the buffer is on rank 0's GPU, or without one in the machine's shared memory."""
        return self.session.share_weights(version)

    def rest(self) -> None:
        self.session.rest()

    def save(self, folder: Path) -> None:
        self.session.save(folder)

    def finish_save(self) -> None:
        self.session.finish_save()

    def load(self, folder: Path) -> None:
        self.session.load(folder)

    def export(self, folder: Path) -> None:
        self.session.export(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}


def _rules(c: ActorUpdate.Config) -> list[tuple[bool, str]]:
    """Every rule of the settings: whether it holds, and what to say where it does not."""
    at_least_one = ("groups_per_step", "mini_batches", "epochs")
    not_negative = ("min_lr", "warmup_steps", "eps", "weight_decay", "clip_grad", "kl_coef", "clip_high", "seed")
    choices: dict[str, Iterable[str]] = {
        "decay": DECAYS,
        "kl": KL_KINDS,
        "aggregation": AGGREGATIONS,
        "recompute": RECOMPUTE,
    }
    choices["old_logprobs"] = OLD_LOGPROBS
    given: dict[str, Any] = {name: getattr(c, name) for name in (*at_least_one, *not_negative, *choices)}
    return [
        *shared_rules(c),
        *((given[n] >= 1, f"{n} must be at least 1, got {given[n]}") for n in at_least_one),
        *((0 <= given[n] < math.inf, f"{n} must be 0 or above, got {given[n]}") for n in not_negative),
        *(
            (given[n] in known, f"{n} must be one of the known, got {given[n]!r}: {known_names(given[n], known)}")
            for n, known in choices.items()
        ),
        (0 < c.lr < math.inf, f"lr must be above 0, got {c.lr}"),
        (c.min_lr <= c.lr, f"min_lr must not be above lr={c.lr}, got {c.min_lr}"),
        (
            c.decay not in ("linear", "cosine") or c.decay_steps > c.warmup_steps,
            f"decay={c.decay!r} needs decay_steps above warmup_steps={c.warmup_steps}, got {c.decay_steps}: "
            "give the run's optimizer steps, or decay='constant'",
        ),
        (all(0 <= beta < 1 for beta in c.betas), f"betas must be from 0 to below 1, got {c.betas}"),
        (0 < c.clip_low < 1, f"clip_low must be between 0 and 1, got {c.clip_low}"),
        (c.dual_clip is None or c.dual_clip > 1, f"dual_clip must be above 1, got {c.dual_clip}: None for no bound"),
        (
            c.aggregation != "seq-mean-token-sum-norm" or (c.max_response_tokens or 0) >= 1,
            "aggregation='seq-mean-token-sum-norm' needs max_response_tokens of at least 1, "
            f"got {c.max_response_tokens}: give the rollout's max_tokens",
        ),
        *(
            (name in OFFLOADS, f"offload must name what is known, got {name!r}: {known_names(name, OFFLOADS)}")
            for name in c.offload
        ),
        (
            not c.correction.is_on or c.old_logprobs == "trainer",
            f"correction={c.correction.kind!r} needs old_logprobs='trainer', got {c.old_logprobs!r}: there the ratio "
            "itself is to the rollout's log-probabilities, and would count twice",
        ),
        (
            c.max_mismatch is None or c.max_mismatch > 0,
            f"max_mismatch must be above 0, got {c.max_mismatch}: None does not check",
        ),
        (
            c.layout.dp <= max(c.groups_per_step, 1),
            f"dp={c.layout.dp} must not be above groups_per_step={c.groups_per_step}: some ranks would never get a "
            "group",
        ),
    ]
