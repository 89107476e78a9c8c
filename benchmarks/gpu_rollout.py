"""Tokens a second of the rollout stage on a GPU against vLLM alone, in the same settings.

    python benchmarks/gpu_rollout.py [--json] [--shape 0.5b] [--rounds 1]

64 prompts of 128 tokens, 8 samples of exactly 512 tokens each: all 512 at once, with CUDA graphs. rollout.py says what
`ours` and `bare` are, and how they take turns; here samples have no seeds, for on a GPU those are drawn one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import bench
import gpu_grpo
import rollout
import train_model

from rollstream import Prompts, Rollout
from rollstream.stages.base import World

PROMPTS, SAMPLES, PROMPT_TOKENS, MAX_TOKENS = 64, 8, 128, 512


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    shape = train_model.SHAPES[given.shape]
    shape.write(model)
    gpu_grpo.write_tokenizer(model, shape.vocab)
    rows = gpu_grpo.write_prompts(folder / "prompts.jsonl", PROMPTS * (given.rounds + 1), PROMPT_TOKENS)
    source = Prompts(Prompts.Config(path=str(rows), model=str(model), prompt="question", chat_template=False))
    assert not source.faults()
    stage = Rollout(
        Rollout.Config(
            model=str(model),
            n=SAMPLES,
            max_tokens=MAX_TOKENS,
            engine="vllm",
            dtype="bfloat16",
            seed=None,
            groups_in_flight=PROMPTS,
            engine_args={
                "load_format": "dummy",
                "max_num_seqs": PROMPTS * SAMPLES,
                "max_model_len": PROMPT_TOKENS + MAX_TOKENS + 16,
                "gpu_memory_utilization": 0.5,
            },
        )
    )
    assert not stage.faults()
    stage.setup(World(threads=8))
    prompts = itertools.chain(source.rows(frozenset(), 0))
    ways = {"ours": rollout.through(stage), "bare": rollout.bare(stage)}
    found = rollout.take_turns(ways, prompts, PROMPTS, given.rounds, warm_groups=8)
    stage.close()
    return {
        "ours_tokens_per_s": found.rate("ours"),
        "bare_tokens_per_s": found.rate("bare"),
        "ours/bare": found.ratio("ours", "bare"),
        "rates": found.rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", choices=train_model.SHAPES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout") as folder:
        results = measure(given, Path(folder))
    bars = {"ours/bare": {"value": results["ours/bare"], "at_least": 0.95}}
    if given.shape == "0.5b":
        bars["tokens_per_s"] = {"value": results["ours_tokens_per_s"], "at_least": 24000}
    print(json.dumps(bench.report(vars(given), ("vllm", "torch", "rollstream"), results, bars)))


if __name__ == "__main__":
    main()
