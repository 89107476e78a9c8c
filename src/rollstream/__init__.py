"""rollstream: reinforcement-learning post-training as a Ray-native pipeline of composable stages.

    rollouts = Rollout(Rollout.Config(...))(Prompts(Prompts.Config(...)))
    scored = Reward(Reward.Config(function="exact_match"))(rollouts)
    update = ActorUpdate(ActorUpdate.Config(...))(Advantage()(scored))
    for step in run(Graph("mine", output=update, weights=Weights(update, to=rollouts)), steps=100):
        print(step.metrics["reward/mean"])

Names are loaded when they are used: importing the package loads neither Ray nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.graphs import Bounds, Evaluation, Graph, Step, Weights, run
    from rollstream.graphs.recipes import GRPO, grpo
    from rollstream.placement import Bundle, Placement
    from rollstream.stages.actor import ActorUpdate
    from rollstream.stages.advantage import Advantage
    from rollstream.stages.logprob import RefLogprob
    from rollstream.stages.loss.correction_settings import Correction
    from rollstream.stages.megatron.layout import Layout
    from rollstream.stages.megatron.lora_settings import Lora
    from rollstream.stages.megatron.moe_settings import Moe
    from rollstream.stages.prompts import Prompts
    from rollstream.stages.reward import Reward, reward
    from rollstream.stages.rollout import Rollout, Trajectory

_HOMES = {
    "rollstream.graphs": ("Bounds", "Evaluation", "Graph", "Step", "Weights", "run"),
    "rollstream.graphs.recipes": ("GRPO", "grpo"),
    "rollstream.placement": ("Bundle", "Placement"),
    "rollstream.stages.actor": ("ActorUpdate",),
    "rollstream.stages.advantage": ("Advantage",),
    "rollstream.stages.logprob": ("RefLogprob",),
    "rollstream.stages.loss.correction_settings": ("Correction",),
    "rollstream.stages.megatron.layout": ("Layout",),
    "rollstream.stages.megatron.lora_settings": ("Lora",),
    "rollstream.stages.megatron.moe_settings": ("Moe",),
    "rollstream.stages.prompts": ("Prompts",),
    "rollstream.stages.reward": ("Reward", "reward"),
    "rollstream.stages.rollout": ("Rollout", "Trajectory"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "GRPO",
    "ActorUpdate",
    "Advantage",
    "Bounds",
    "Bundle",
    "Correction",
    "Evaluation",
    "Graph",
    "Layout",
    "Lora",
    "Moe",
    "Placement",
    "Prompts",
    "RefLogprob",
    "Reward",
    "Rollout",
    "Step",
    "Trajectory",
    "Weights",
    "grpo",
    "reward",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
