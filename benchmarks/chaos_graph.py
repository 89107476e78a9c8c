"""The graph that chaos.py runs: GRPO on a tiny model, whose update stage writes down what it was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollstream import ActorUpdate, Advantage, Graph, Prompts, RefLogprob, Reward, Rollout, Weights
from rollstream.stages.base import Metric

RECORD = "witness.json"


class Witness(ActorUpdate):
    """An actor update that keeps the ids and lengths of all groups that its weights have seen."""

    seen: list[dict[str, Any]]

    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        metrics = super().update(groups)
        self.seen = [*getattr(self, "seen", []), *(_summary(group) for group in groups)]
        return metrics

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / RECORD).write_text(json.dumps(getattr(self, "seen", [])))

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.seen = json.loads((folder / RECORD).read_text())

    def export(self, folder: Path) -> None:
        super().export(folder)
        (folder / RECORD).write_text(json.dumps(self.seen))


def share_of_digits(response: str) -> float:
    return sum(c.isdigit() for c in response) / max(len(response), 1)


def graph(inputs: Path, groups_per_step: int, staleness: int, engine: str) -> Graph:
    model = str(inputs / "model")
    prompts = Prompts(Prompts.Config(path=str(inputs / "sums.jsonl"), model=model, prompt="question", answer="answer"))
    rollouts = Rollout(Rollout.Config(model=model, n=4, max_tokens=64, temperature=1.0, engine=engine))(prompts)
    scored = Reward(Reward.Config(function=share_of_digits))(rollouts)
    ref = RefLogprob(RefLogprob.Config(model=model))(rollouts)
    actor = Witness.Config(
        model=model,
        groups_per_step=groups_per_step,
        lr=1e-3,
        kl_coef=0.01,
        old_logprobs="rollout" if staleness else "trainer",
    )
    update = Witness(actor)(Advantage()(scored), ref=ref)
    return Graph("chaos", output=update, weights=Weights(update, to=rollouts, max_staleness=staleness))


def _summary(group: pa.RecordBatch) -> dict[str, Any]:
    lengths = [len(ids) for ids in group.column("response_ids").to_pylist()]
    first = group.to_pylist()[0]
    return {"group_id": first["group_id"], "order": first["order"], "lengths": lengths, "text": first["response"]}
