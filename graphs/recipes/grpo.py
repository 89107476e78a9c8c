"""GRPO: group-relative advantages, a clipped loss, optionally a KL to a frozen reference.

    prompts -> rollout -> reward -> advantage -> actor_update
                    \\-> ref_logprob ------------/              (where kl_coef > 0, without lora)

Source of the method: DeepSeekMath, arXiv 2402.03300.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.graphs.evaluation import Evaluation
from rollstream.graphs.graph import Graph
from rollstream.graphs.weights import Weights
from rollstream.stages.actor import ActorUpdate
from rollstream.stages.advantage import Advantage
from rollstream.stages.logprob import RefLogprob
from rollstream.stages.prompts import Prompts
from rollstream.stages.reward import Reward
from rollstream.stages.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Settings of each stage. `ref` is needed where `actor.kl_coef` is above 0, unless adapters are trained: then the
    model without them is the reference."""

    data: Prompts.Config
    rollout: Rollout.Config
    reward: Reward.Config
    actor: ActorUpdate.Config
    advantage: Advantage.Config = field(default_factory=Advantage.Config)
    ref: RefLogprob.Config | None = None
    #: Versions that a group may be behind when it is trained; above 0, generation overlaps training.
    max_staleness: int = 0
    #: What the run is judged by while it trains.
    evaluations: Sequence[Evaluation] = ()
    name: str = "grpo"


def grpo(config: GRPO) -> Graph:
    """The graph. Reward and reference run side by side on the same rollouts."""
    rollouts = Rollout(config.rollout)(Prompts(config.data))
    scored = Reward(config.reward)(rollouts)
    ref = RefLogprob(config.ref)(rollouts) if config.ref else None
    update = ActorUpdate(config.actor)(Advantage(config.advantage)(scored), ref=ref)
    weights = Weights(update, to=rollouts, max_staleness=config.max_staleness)
    return Graph(config.name, output=update, weights=weights, evaluations=config.evaluations)
