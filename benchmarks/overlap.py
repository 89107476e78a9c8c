"""How much of generation and training goes on at once: a step's time against its parts, whose costs are set by sleeps.

    python benchmarks/overlap.py [--json] [--steps 20]

    staleness 0    a step is generation, then training: against their sum
    staleness 1    the next step's groups are made while this one is trained: against the longer of the two
    staleness 2    the same, with a step's groups in hand

`equal` is the hardest case: nothing of either is hidden behind the other, and what the runner and the edges take shows.
A step's time is that between one `Step` and the next, as the caller of `run` sees it; figures are medians over all
steps but the first few. The age of what was trained is read off the tokens themselves and off `Step.staleness`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import bench
import memory_graph
import overlap_graph

from rollstream import run
from rollstream.graphs.stats import Step

STORE_BYTES = 512 << 20
GROUPS_PER_STEP = 8
#: Seconds of a step's generation and training.
COSTS_S = {"equal": (1.0, 1.0), "training_shorter": (1.0, 0.6)}
MAX_STALENESS = (0, 1, 2)
#: Of step / max(generation, training).
AT_MOST = {1: 1.10, 2: 1.05}
WARMUP_STEPS = 4
MIN_STEPS = 12


def measure(generation_s: float, training_s: float, max_staleness: int, steps: int, folder: Path) -> dict[str, Any]:
    """Runs the graph for `steps` steps after the warm-up."""
    graph = overlap_graph.graph(GROUPS_PER_STEP, generation_s, training_s, max_staleness)
    num_steps = WARMUP_STEPS + steps
    options: dict[str, Any] = {"export": False, "save_every": num_steps, "samples_every": num_steps}
    done: list[tuple[float, Step]] = []
    for step in run(graph, steps=num_steps, out=folder, **options):
        done.append((time.monotonic(), step))
    times_s = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(done)]
    return figures(times_s[WARMUP_STEPS - 1 :], [step for _, step in done], generation_s, training_s)


def figures(times_s: list[float], steps: list[Step], generation_s: float, training_s: float) -> dict[str, Any]:
    step_s = statistics.median(times_s)
    # the last step also writes the checkpoint of the end
    inner = steps[WARMUP_STEPS:-1]
    return {
        "steps": len(times_s),
        "step_s": round(step_s, 4),
        "max_step_s": round(max(times_s), 4),
        "wait_s": round(statistics.median(step.metrics["time/wait_s"] for step in inner), 4),
        "update_s": round(statistics.median(step.metrics["time/update_s"] for step in inner), 4),
        "step/sum": round(step_s / (generation_s + training_s), 4),
        "step/max": round(step_s / max(generation_s, training_s), 4),
        "oldest_token": int(max(step.metrics[overlap_graph.AGE] for step in steps)),
        "oldest_group": max(age for step in steps for age in step.staleness),
        "groups": sum(len(step.staleness) for step in steps),
    }


def bars(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for case in COSTS_S:
        for max_staleness in MAX_STALENESS:
            name = f"{case}, staleness {max_staleness}"
            result = results[name]
            if max_staleness == 0:
                found[f"{name}: step/sum"] = {"value": result["step/sum"], "at_least": 0.95}
                found[f"{name}: step/sum from above"] = {"value": result["step/sum"], "at_most": 1.05}
            else:
                found[f"{name}: step/max"] = {"value": result["step/max"], "at_most": AT_MOST[max_staleness]}
            age = max(result["oldest_token"], result["oldest_group"])
            found[f"{name}: age beyond bound"] = {"value": age - max_staleness, "at_most": 0}
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="only the JSON object")
    arguments.add_argument("--steps", type=int, default=20, help=f"measured ones, at least {MIN_STEPS}")
    given = arguments.parse_args()
    if given.steps < MIN_STEPS:
        arguments.error(f"--steps must be at least {MIN_STEPS}, got {given.steps}")
    load_before = os.getloadavg()[0]
    results: dict[str, dict[str, Any]] = {}
    with bench.private_cluster("overlap", num_cpus=8, store_bytes=STORE_BYTES) as folder:
        for case, (generation_s, training_s) in COSTS_S.items():
            for max_staleness in MAX_STALENESS:
                name = f"{case}, staleness {max_staleness}"
                out = folder / f"{case}_{max_staleness}"
                results[name] = measure(generation_s, training_s, max_staleness, given.steps, out)
                if not given.json:
                    print(f"{name:28} {results[name]}", flush=True)
    settings = {
        "groups_per_step": GROUPS_PER_STEP,
        "group_bytes": sum(memory_graph.group_bytes().values()),
        "costs_s": {case: dict(zip(("generation", "training"), costs, strict=True)) for case, costs in COSTS_S.items()},
        "other_stages_s": 0.0,
        "warmup_steps": WARMUP_STEPS,
        "steps": given.steps,
        "load_before": round(load_before, 2),
        "niceness": os.nice(0),
        "worker_niceness": os.environ.get("RAY_worker_niceness", "Ray's own"),  # noqa: SIM112 - Ray's own spelling
    }
    report = bench.report(settings, ("ray", "pyarrow", "rollstream"), results, bars(results))
    if not given.json:
        for name, bar in report["bars"].items():
            print(f"{name}: {bar}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
