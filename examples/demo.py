"""The demo: a real model of 135 M parameters learns to answer sums, on a laptop's CPU, in some minutes.

    python examples/demo.py [--steps N] [--out FOLDER]

The model knows many sums, but after the right number it goes on talking. The reward asks for the number alone. Trained
with GRPO through the whole graph, it is judged by prompts that it never trained on: `exact` is the share of responses
that are the right number and nothing else, `anywhere` the share that hold the right number at all.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from pathlib import Path

import demo_assets

from rollstream import (
    GRPO,
    ActorUpdate,
    Evaluation,
    Graph,
    Prompts,
    RefLogprob,
    Reward,
    Rollout,
    Step,
    grpo,
    reward,
    run,
)
from rollstream.graphs.stats import Evaluated


@reward
def number_alone(response: str, target: str, finish_reason: str) -> float:
    """1 for the right number and then the end; 0.3 where more follows. A response cut off at max_tokens did not end."""
    if response.strip() == target and finish_reason == "stop":
        return 1.0
    first = re.search(r"\d+", response)
    return 0.3 if first and first[0] == target else 0.0


def judged(response: str, target: str) -> tuple[float, dict[str, float]]:
    """Whether the response is the right number alone, and whether it holds it at all."""
    return float(response.strip() == target), {"anywhere": float(target in re.findall(r"\d+", response))}


def graph(model: Path, prompts: Path, evaluation: Evaluation) -> Graph:
    return grpo(
        GRPO(
            name="sums",
            data=Prompts.Config(path=str(prompts), model=str(model), chat_template=False),
            rollout=Rollout.Config(model=str(model), n=8, max_tokens=5),
            reward=Reward.Config(function=number_alone),
            ref=RefLogprob.Config(model=str(model)),
            actor=ActorUpdate.Config(
                model=str(model),
                groups_per_step=8,
                lr=3e-5,
                warmup_steps=3,
                betas=(0.9, 0.95),
                kl_coef=0.005,
                micro_batch_size=32,
            ),
            evaluations=[evaluation],
        )
    )


def held_out(model: Path, prompts: Path, every: int) -> Evaluation:
    """Greedy answers of at most 12 tokens to sums that are not trained on."""
    source = Prompts(Prompts.Config(path=str(prompts), model=str(model), chat_template=False))
    answers = Rollout(Rollout.Config(model=str(model), n=1, temperature=0, max_tokens=12, groups_in_flight=64))(source)
    return Evaluation(Reward(Reward.Config(function=judged))(answers), every=every)


def shares(found: Evaluated) -> dict[str, float]:
    """Of the held-out sums: those answered exactly, and those whose answer is anywhere in the response."""
    return {"exact": found.metrics["eval/reward/mean"], "anywhere": found.metrics["eval/reward/part/anywhere"]}


def plot(steps: list[Step], evaluations: list[Evaluated], file: Path) -> None:
    """The run's curves as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    for axis, (name, title) in zip(
        axes,
        [
            ("reward/mean", "mean reward of a step's rollouts"),
            ("rollout/response_tokens", "response length in tokens"),
            ("ref/kl", "KL to the reference, nats a token"),
        ],
        strict=False,
    ):
        axis.plot([s.index for s in steps], [s.metrics[name] for s in steps], color="tab:blue")
        axis.set_title(title, fontsize=10)
    for name in ("exact", "anywhere"):
        axes[3].plot([e.step for e in evaluations], [100 * shares(e)[name] for e in evaluations], "o-", label=name)
    axes[3].set_ylim(0, 105)
    axes[3].set_title(f"{demo_assets.NUM_HELDOUT} held-out sums, % right", fontsize=10)
    axes[3].legend(fontsize=8)
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--out", type=Path, default=Path("runs/demo"))
    given = arguments.parse_args()
    begun = time.monotonic()
    model, (train, heldout) = demo_assets.model(), demo_assets.prompts()
    out = given.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    halves = given.steps % 2 == 0  # the last step must be among them
    evaluation = held_out(model, heldout, every=given.steps // 2 if halves else given.steps)
    steps: list[Step] = []
    for step in run(graph(model, train, evaluation), steps=given.steps, out=out):
        steps.append(step)
        for found in step.evaluations:
            print(f"held-out sums after {found.step} steps: {_shares(found)}", flush=True)
    evaluations = [found for step in steps for found in step.evaluations]
    plot(steps, evaluations, out / "curves.png")
    result = {
        "evaluations": {e.step: shares(e) for e in evaluations},
        "curves": [{"step": s.index, **s.metrics} for s in steps],
    }
    (out / "result.json").write_text(json.dumps(result, indent=1))
    print(
        f"""
held-out sums before: {_shares(evaluations[0])}
held-out sums after:  {_shares(evaluations[-1])}        in {time.monotonic() - begun:.0f} s

curves       {out / "curves.png"}
MLflow run   mlflow ui --backend-store-uri sqlite:///{out.parent / "mlflow.db"}     then open http://127.0.0.1:5000
checkpoint   {out / "checkpoints"}     go on with it: run(graph, steps=..., out="{out}", resume="must")
model        {out / "model"}     open it: transformers.AutoModelForCausalLM.from_pretrained("{out / "model"}")"""
    )


def _shares(found: Evaluated) -> str:
    return "   ".join(f"{name} {100 * value:.1f} %" for name, value in shares(found).items())


if __name__ == "__main__":
    main()
