"""The parts of a GRPO step on this machine, each against the plain way to do it, in one run.

    python benchmarks/cpu_parts.py [--json] [--prompts 16] [--samples 8] [--repeats 5]

    rollout     our engine (a prompt's samples share its prefill)  against transformers' generate, same batch
    reference   RefLogprob (packed, logits at response tokens only) against transformers' forward, padded, same batch

SmolLM2-135M-Instruct, float32, the demo's prompts. Figures are medians; ratios are the plain way's time over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import bench
import demo_assets
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM

from rollstream import Prompts, RefLogprob, Rollout
from rollstream.stages.base import World

MAX_TOKENS = 8


def median_s(repeats: int, work: Callable[[], Any]) -> float:
    """Median seconds of `repeats` calls, after one that is not counted."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    ids = [f + r if left else r + f for r, f in zip(rows, fill, strict=True)]
    mask = [
        [0] * len(f) + [1] * len(r) if left else [1] * len(r) + [0] * len(f) for r, f in zip(rows, fill, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def measure(prompts: int, samples: int, repeats: int) -> dict[str, Any]:
    folder, (train, _) = str(demo_assets.model()), demo_assets.prompts()
    source = Prompts(Prompts.Config(path=str(train), model=folder, chat_template=False))
    assert not source.faults()
    rows = source.rows(frozenset(), 0)
    groups = [next(rows) for _ in range(prompts)]
    world = World(threads=os.cpu_count() or 1)
    rollout = Rollout(Rollout.Config(model=folder, n=samples, max_tokens=MAX_TOKENS))
    rollout.setup(world)
    reference = RefLogprob(RefLogprob.Config(model=folder))
    reference.setup(world)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rolled: list[pa.RecordBatch] = list(rollout.run(groups))
    asked = [group.column("prompt_ids")[0].as_py() for group in groups for _ in range(samples)]
    full = [
        row["prompt_ids"] + row["response_ids"]
        for group in rolled
        for row in group.select(["prompt_ids", "response_ids"]).to_pylist()
    ]

    def generate() -> None:
        ids, mask = padded(asked, left=True)
        plain.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=MAX_TOKENS, pad_token_id=0)

    def forward() -> None:
        for start in range(0, len(full), samples):
            ids, mask = padded(full[start : start + samples], left=False)
            plain(ids, attention_mask=mask).logits.log_softmax(-1)

    with torch.no_grad():
        ours = {
            "rollout_s": median_s(repeats, lambda: list(rollout.run(groups))),
            "reference_s": median_s(repeats, lambda: [reference.run(group) for group in rolled]),
        }
        theirs = {"rollout_s": median_s(repeats, generate), "reference_s": median_s(repeats, forward)}
    reference.close()
    ratios = {f"{name.removesuffix('_s')}_ratio": theirs[name] / ours[name] for name in ours}
    return {"ours": ours, "plain": theirs, **ratios, "tokens": sum(map(len, full))}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--prompts", type=int, default=16)
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    results = measure(given.prompts, given.samples, given.repeats)
    settings = {**vars(given), "max_tokens": MAX_TOKENS}
    report = bench.report(settings, ("torch", "transformers", "megatron-core", "rollstream"), results, {})
    if not given.json:
        for name in ("rollout", "reference"):
            print(
                f"{name:10} {results['ours'][name + '_s']:.2f} s, plain {results['plain'][name + '_s']:.2f} s, "
                f"ratio {results[name + '_ratio']:.2f}"
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
