"""The same learning with rollouts of the newest weights, and of older ones.

    python benchmarks/staleness.py [--json] [--steps 40] [--engine transformers]

GRPO on a tiny random model, rewarded by the share of a response's tokens that are lower-case letters, with
`max_staleness` 0, 1 and 4, three seeds each, one run after the other. Above 0, generation goes on while the policy is
trained, and tokens that older weights drew are weighed by truncated importance sampling (`Correction(kind="tis")`).
How old the groups really were when they were trained is read off `Step.staleness`, of each run. The first steps of a
run are younger by nature: step k trains on what is at most k - 1 versions old.

A run has learned if some MEAN_STEPS steps in a row have a mean reward above the threshold. The curves are drawn to
results/staleness.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
import tiny_model

from rollstream import GRPO, ActorUpdate, Correction, Graph, Placement, Prompts, Reward, Rollout, grpo, reward, run
from rollstream.graphs.stats import Step

STORE_BYTES = 512 << 20
MAX_STALENESS = (0, 1, 4)
SEEDS = (0, 1, 2)
GROUPS_PER_STEP, SAMPLES, MAX_TOKENS = 8, 8, 8
LR, TEMPERATURE = 3e-3, 1.0
CORRECTION = "tis"
MEAN_STEPS = 5
#: Mean reward of MEAN_STEPS steps that a run must reach.
THRESHOLD = 0.9
#: Mean age of a run's groups over the oldest that the bound allows: below, the run is not what its name says.
AGE_AT_LEAST = 0.9
PICTURE = Path(__file__).parent / "results" / "staleness.png"


@reward
def share_of_letters(response: str, response_ids: list[int]) -> float:
    return sum("a" <= c <= "z" for c in response) / len(response_ids)


def graph(model: str, prompts: str, max_staleness: int, seed: int, engine: str) -> Graph:
    return grpo(
        GRPO(
            name="staleness",
            data=Prompts.Config(path=prompts, model=model, prompt="question", seed=seed),
            rollout=Rollout.Config(
                model=model, n=SAMPLES, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed, engine=engine
            ),
            reward=Reward.Config(function=share_of_letters),
            actor=ActorUpdate.Config(
                model=model,
                groups_per_step=GROUPS_PER_STEP,
                lr=LR,
                temperature=TEMPERATURE,
                old_logprobs="trainer",
                correction=Correction(kind=CORRECTION if max_staleness else "none"),
                seed=seed,
            ),
            max_staleness=max_staleness,
        )
    )


def learn(chosen: Graph, steps: int, out: Path) -> dict[str, Any]:
    """One run, as numbers."""
    begun_s = time.perf_counter()
    options: dict[str, Any] = {"export": False, "save_every": steps, "samples_every": steps}
    done: list[Step] = list(run(chosen, steps=steps, out=out, placement=Placement.auto(threads=1), **options))
    rewards = [step.metrics["reward/mean"] for step in done]
    ages = [age for step in done for age in step.staleness]
    return {
        "best": round(max(means(rewards)), 4),
        "first": round(means(rewards)[0], 4),
        "last": round(means(rewards)[-1], 4),
        "mean_staleness": round(statistics.mean(ages), 3),
        "max_staleness": max(ages),
        "groups": len(ages),
        "smallest_ess": round(min(step.metrics["rollout/ess"] for step in done), 4),
        "seconds": round(time.perf_counter() - begun_s, 1),
        "rewards": [round(value, 4) for value in rewards],
    }


def means(values: Sequence[float]) -> list[float]:
    """Of each MEAN_STEPS values in a row."""
    return [statistics.mean(values[i : i + MEAN_STEPS]) for i in range(len(values) - MEAN_STEPS + 1)]


def bars(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for staleness in MAX_STALENESS:
        runs = [results[name_of(staleness, seed)] for seed in SEEDS]
        name = f"staleness {staleness}"
        found[f"{name}: best reward"] = {"value": min(r["best"] for r in runs), "at_least": THRESHOLD}
        oldest = max(r["max_staleness"] for r in runs)
        found[f"{name}: age beyond bound"] = {"value": oldest - staleness, "at_most": 0}
        if staleness:
            allowed = statistics.mean(min(k, staleness) for k in range(len(runs[0]["rewards"])))
            age = min(r["mean_staleness"] for r in runs) / allowed
            found[f"{name}: mean age / allowed"] = {"value": round(age, 4), "at_least": AGE_AT_LEAST}
    return found


def name_of(max_staleness: int, seed: int) -> str:
    return f"staleness {max_staleness}, seed {seed}"


def plot(results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """The rewards of all runs, a colour for each staleness."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for staleness, colour in zip(MAX_STALENESS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        for seed in SEEDS:
            result = results[name_of(staleness, seed)]
            label = f"max_staleness {staleness}" if seed == SEEDS[0] else None
            steps = range(1, len(result["rewards"]) + 1)
            axis.plot(steps, result["rewards"], color=colour, alpha=0.8, linewidth=1.2, label=label)
    axis.axhline(THRESHOLD, color="grey", linestyle=":", label=f"threshold, for {MEAN_STEPS}-step means")
    axis.set_xlabel("step")
    axis.set_ylabel("mean reward")
    axis.set_title(f"GRPO on a tiny model, {len(SEEDS)} seeds each", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="only the JSON object")
    arguments.add_argument("--steps", type=int, default=40, help=f"at least {MEAN_STEPS}")
    arguments.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    arguments.add_argument("--picture", type=Path, default=PICTURE)
    given = arguments.parse_args()
    if given.steps < MEAN_STEPS:
        arguments.error(f"--steps must be at least {MEAN_STEPS}, got {given.steps}")
    load_before = os.getloadavg()[0]
    results: dict[str, dict[str, Any]] = {}
    with bench.private_cluster("stale", num_cpus=8, store_bytes=STORE_BYTES) as folder:
        model = str(tiny_model.write_model(folder / "model"))
        prompts = str(tiny_model.write_sums(folder / "sums.jsonl"))
        for staleness, seed in itertools.product(MAX_STALENESS, SEEDS):
            name = name_of(staleness, seed)
            chosen = graph(model, prompts, staleness, seed, given.engine)
            results[name] = learn(chosen, given.steps, folder / "runs" / f"{staleness}_{seed}")
            if not given.json:
                print(f"{name:20} { ({k: v for k, v in results[name].items() if k != 'rewards'}) }", flush=True)
    plot(results, given.picture)
    settings = {
        "engine": given.engine,
        "steps": given.steps,
        "groups_per_step": GROUPS_PER_STEP,
        "samples": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "lr": LR,
        "temperature": TEMPERATURE,
        "correction": f"{CORRECTION} for max_staleness above 0",
        "mean_steps": MEAN_STEPS,
        "threshold": THRESHOLD,
        "load_before": round(load_before, 2),
    }
    packages = ("ray", "torch", "transformers", "megatron-core", "rollstream")
    print(json.dumps(bench.report(settings, packages, results, bars(results))))


if __name__ == "__main__":
    main()
