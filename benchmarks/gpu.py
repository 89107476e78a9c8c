"""All figures of one GPU, each part in a process of its own, and a short table of them last.

    python benchmarks/gpu.py [--json] [--parts train_0.5b,weights_3b] [--out FOLDER]

    train_0.5b, train_3b      optimizer steps, and the memory of their parts           gpu_train.py
    rollout                   the rollout stage against vLLM alone                     gpu_rollout.py
    weights_3b, weights_7b    from the trainer to the engine                           gpu_weights.py
    grpo_0, grpo_1            the whole graph at staleness 0 and 1                     gpu_grpo.py
    learn                     a real model learns                                      gpu_learn.py
    natural_turns, natural_1  1.5 B parameters, natural lengths: by turns, and side by side at staleness 1

Each part's report is written to FOLDER/gpu_PART.json as soon as it is there; one that fails or takes too long is told
of and leaves the others alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """A benchmark with its arguments, and how long it may take."""

    script: str
    arguments: str
    limit_s: float


NATURAL = "--shape 1.5b --max-tokens 1024 --stop-every 400 --kv-share 0.25"
PARTS = {
    "train_0.5b": Part("gpu_train", "--shape 0.5b --megatron", 240),
    "train_3b": Part("gpu_train", "--shape 3b --tokens 16384 --samples 128 --longest 2048", 180),
    "weights_3b": Part("gpu_weights", "--shape 3b", 240),
    "weights_7b": Part("gpu_weights", "--shape 7b", 240),
    "rollout": Part("gpu_rollout", "", 300),
    "grpo_0": Part("gpu_grpo", "--staleness 0 --steps 4", 400),
    "grpo_1": Part("gpu_grpo", "--staleness 1 --steps 6", 400),
    "learn": Part("gpu_learn", "", 600),
    "natural_turns": Part("gpu_grpo", f"{NATURAL} --staleness 0 --sharing turns --steps 4", 500),
    "natural_1": Part("gpu_grpo", f"{NATURAL} --staleness 1 --sharing side_by_side --steps 6", 500),
}


def run_part(name: str, folder: Path) -> dict[str, Any] | None:
    """Its report; None where it gave none, and why on standard error."""
    part = PARTS[name]
    command = [sys.executable, str(HERE / f"{part.script}.py"), "--json", *part.arguments.split()]
    log = folder / f"gpu_{name}.log"
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=part.limit_s, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}; its output is in {log}", file=sys.stderr, flush=True)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"settings"')]
    if not lines:
        return None
    report: dict[str, Any] = json.loads(lines[-1])
    (folder / f"gpu_{name}.json").write_text(json.dumps(report, indent=1))
    log.unlink()
    return report


def rows(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The table."""
    for name, report in reports.items():
        results = report["results"]
        if "seconds" in results:
            seconds = results["seconds"]
            shown = {
                k: seconds[k] for k in ("step", "generation", "reference", "wait", "update", "weights", "mismatch")
            }
            yield f"{name:14} " + "  ".join(f"{k} {v:.3g}" for k, v in shown.items())
        for bar, found in report["bars"].items():
            bound = next(k for k in ("at_least", "at_most") if k in found)
            met = found["value"] >= found[bound] if bound == "at_least" else found["value"] <= found[bound]
            sign = ">=" if bound == "at_least" else "<="
            yield f"{name:14} {bar:14} {found['value']:10.4g} {sign} {found[bound]:<10.4g} {'' if met else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    names = given.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}: there are {', '.join(PARTS)}")
    folder = given.out or Path(tempfile.mkdtemp(prefix="gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    reports: dict[str, dict[str, Any]] = {}
    for name in names:
        if report := run_part(name, folder):
            reports[name] = report
    if not given.json:
        print("\n".join(rows(reports)))
    bars = {f"{name}: {bar}": found for name, report in reports.items() for bar, found in report["bars"].items()}
    results = {name: report["results"] for name, report in reports.items()}
    settings = {"parts": names, "missing": [name for name in names if name not in reports]}
    print(json.dumps(bench.report(settings, ("torch", "megatron-core", "vllm", "ray", "rollstream"), results, bars)))


if __name__ == "__main__":
    main()
