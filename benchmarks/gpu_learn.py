"""A real model learns on one GPU: SmolLM2-135M answers sums and differences, judged by some that it never trained on.

    python benchmarks/gpu_learn.py [--json] [--steps 150] [--prompts 64] [--samples 16] [--lr 1e-5] [--plot FILE]

The tasks are reasoning-gym's: two numbers of one or two digits, with + or -. The prompt begins the answer, as in the
demo; the reward is 1 for the right number and then the end, and a little for a right number that more follows. Held-out
accuracy (greedy, the number alone) is measured beside training, in a process and an engine of its own. All is in
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import bench
import demo_assets

from rollstream import (
    GRPO,
    ActorUpdate,
    Evaluation,
    Graph,
    Placement,
    Prompts,
    Reward,
    Rollout,
    Step,
    grpo,
    reward,
    run,
)
from rollstream.graphs.stats import Evaluated

NUM_HELDOUT = 256
#: Of held-out tasks, in shares of 1.
GAIN = 0.3


@reward
def number_alone(response: str, target: str, finish_reason: str) -> float:
    if response.strip() == target and finish_reason == "stop":
        return 1.0
    first = re.search(r"-?\d+", response)
    return 0.1 if first and first[0] == target else 0.0


def judged(response: str, target: str) -> float:
    return float(response.strip() == target)


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Files of tasks to train on and of others."""
    import reasoning_gym

    tasks = reasoning_gym.create_dataset(
        "basic_arithmetic", size=12_000, seed=11, min_terms=2, max_terms=2, min_digits=1, max_digits=2,
        operators=["+", "-"], allow_parentheses=False, allow_negation=False,
    )  # fmt: skip
    rows = {
        task["metadata"]["expression"]: {
            "prompt": demo_assets.FORM.format(task["metadata"]["expression"]),
            "answer": task["answer"],
        }
        for task in tasks
    }
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    train.write_text("".join(lines[NUM_HELDOUT:]))
    heldout.write_text("".join(lines[:NUM_HELDOUT]))
    return train, heldout


def make_graph(given: argparse.Namespace, folder: Path) -> Graph:
    model = str(demo_assets.model())
    train, heldout = write_tasks(folder)
    args: dict[str, Any] = {"gpu_memory_utilization": 0.15, "max_model_len": 256} if given.device == "cuda" else {}
    common: dict[str, Any] = {"model": model, "engine": "vllm", "dtype": given.dtype, "engine_args": args}

    def source(path: Path) -> Any:
        return Prompts.Config(path=str(path), model=model, chat_template=False)

    answers = Rollout(Rollout.Config(n=1, temperature=0, max_tokens=12, groups_in_flight=NUM_HELDOUT, **common))
    marks = Reward(Reward.Config(function=judged))(answers(Prompts(source(heldout))))
    return grpo(
        GRPO(
            name="learn",
            data=source(train),
            rollout=Rollout.Config(n=given.samples, max_tokens=8, groups_in_flight=given.prompts, seed=None, **common),
            reward=Reward.Config(function=number_alone),
            actor=ActorUpdate.Config(
                model=model,
                dtype=given.dtype,
                groups_per_step=given.prompts,
                lr=given.lr,
                warmup_steps=5,
                betas=(0.9, 0.95),
            ),
            evaluations=[Evaluation(marks, every=given.every)],
        )
    )


def plot(found: list[Evaluated], steps: list[Step], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot([e.step for e in found], [100 * e.metrics["eval/reward/mean"] for e in found], "o-")
    left.set_title(f"{NUM_HELDOUT} held-out tasks, % right", fontsize=10)
    left.set_ylim(0, 100)
    right.plot([s.index for s in steps], [s.metrics["reward/mean"] for s in steps])
    right.set_title("mean reward of a step's rollouts", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with bench.private_cluster("learn", num_cpus=16, store_bytes=4 * 1024**3) as folder:
        steps: list[Step] = []
        begun = time.monotonic()
        first = 0.0
        placement = Placement.colocated(cpus=8, gpus=1 if given.device == "cuda" else 0, threads=given.threads)
        graph = make_graph(given, folder)
        for step in run(
            graph, placement=placement, steps=given.steps, out=folder / "out", save_every=None, export=False
        ):
            first = first or time.monotonic()
            steps.append(step)
            for found in step.evaluations:
                print(f"step {found.step}: {found.metrics['eval/reward/mean']:.3f}", flush=True)
        took_s, training_s = time.monotonic() - begun, time.monotonic() - first
    evaluations = sorted((found for step in steps for found in step.evaluations), key=lambda found: found.step)
    if given.plot:
        plot(evaluations, steps, given.plot)
    accuracy = {found.step: found.metrics["eval/reward/mean"] for found in evaluations}
    return {
        "accuracy": accuracy,
        "gain": accuracy[max(accuracy)] - accuracy[0],
        "seconds": took_s,
        "seconds_of_training": training_s,
        "reward": [step.metrics["reward/mean"] for step in steps],
        "mismatch": [step.metrics["rollout/logprob_diff"] for step in steps],
        "kl": [step.metrics["rollout/mismatch_k3"] for step in steps],
        "step_s": [step.metrics["time/step_s"] for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    results = measure(given)
    bars = {
        "gain": {"value": results["gain"], "at_least": GAIN},
        "seconds": {"value": results["seconds"], "at_most": 600},
    }
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    print(json.dumps(bench.report(settings, ("torch", "megatron-core", "ray", "rollstream"), results, bars)))


if __name__ == "__main__":
    main()
