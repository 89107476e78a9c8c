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

from rollstream import GRPO, ActorUpdate, Graph, Prompts, RefLogprob, Reward, Rollout, grpo, reward, run


@reward
def number_alone(response: str, target: str, finish_reason: str) -> float:
    """1 for the right number and then the end; 0.3 where more follows. A response cut off at max_tokens did not end."""
    if response.strip() == target and finish_reason == "stop":
        return 1.0
    first = re.search(r"\d+", response)
    return 0.3 if first and first[0] == target else 0.0


def graph(model: Path, prompts: Path) -> Graph:
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
        )
    )


def accuracy(model: Path, heldout: Path) -> dict[str, float]:
    """Greedy answers of at most 12 tokens, judged: the shares "exact" and "anywhere"."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    from rollstream.stages.rollout.engine import Request, Sampling, generate
    from rollstream.stages.rollout.hf_engine import TransformersEngine

    rows = pq.read_table(heldout).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(model)
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=tokenizer(row["prompt"]).input_ids,
            sample_ids=(str(i),),
            sampling=Sampling(temperature=0, max_tokens=12),
        )
        for i, row in enumerate(rows)
    ]
    engine = TransformersEngine(str(model), dtype="float32", stage="evaluation")
    answers = generate(engine, requests)
    said = {int(i): tokenizer.decode(s[0].response_ids, skip_special_tokens=True) for i, s in answers}
    engine.close()
    exact = sum(said[i].strip() == row["answer"] for i, row in enumerate(rows))
    anywhere = sum(row["answer"] in re.findall(r"\d+", said[i]) for i, row in enumerate(rows))
    return {"exact": exact / len(rows), "anywhere": anywhere / len(rows)}


def plot(curves: list[dict[str, float]], before: dict[str, float], after: dict[str, float], file: Path) -> None:
    """The run's curves as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    steps = [int(c["step"]) for c in curves]
    for axis, (name, title) in zip(
        axes,
        [
            ("reward/mean", "mean reward of a step's rollouts"),
            ("rollout/response_tokens", "response length in tokens"),
            ("ref/kl", "KL to the reference, nats a token"),
        ],
        strict=False,
    ):
        axis.plot(steps, [c[name] for c in curves], color="tab:blue")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    for offset, (label, values) in enumerate([("before", before), ("after", after)]):
        bars = axes[3].bar([offset - 0.2 + 2.2 * i for i in range(2)], [100 * v for v in values.values()], label=label)
        axes[3].bar_label(bars, fmt="%.0f")
    axes[3].set_xticks([0.3, 2.5], list(before))
    axes[3].set_ylim(0, 105)
    axes[3].set_title("128 held-out sums, % right", fontsize=10)
    axes[3].legend(fontsize=8)
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
    before = accuracy(model, heldout)
    print(f"held-out sums before: {_shares(before)}", flush=True)
    curves = [{"step": s.index, **s.metrics} for s in run(graph(model, train), steps=given.steps, out=out)]
    after = accuracy(out / "model", heldout)
    plot(curves, before, after, out / "curves.png")
    (out / "result.json").write_text(json.dumps({"before": before, "after": after, "curves": curves}, indent=1))
    print(
        f"""
held-out sums before: {_shares(before)}
held-out sums after:  {_shares(after)}        in {time.monotonic() - begun:.0f} s

curves       {out / "curves.png"}
MLflow run   mlflow ui --backend-store-uri sqlite:///{out.parent / "mlflow.db"}     then open http://127.0.0.1:5000
checkpoint   {out / "checkpoints"}     go on with it: run(graph, steps=..., out="{out}", resume="must")
model        {out / "model"}     open it: transformers.AutoModelForCausalLM.from_pretrained("{out / "model"}")"""
    )


def _shares(values: dict[str, float]) -> str:
    return "   ".join(f"{name} {100 * value:.1f} %" for name, value in values.items())


if __name__ == "__main__":
    main()
