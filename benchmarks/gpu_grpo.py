"""GRPO with a reference, the whole graph on one GPU: seconds of a step and of its parts.

    python benchmarks/gpu_grpo.py [--json] [--shape 1.4b] [--staleness 0] [--steps 4] [--prompts 64] [--samples 8]
        [--max-tokens 512] [--sharing auto|side_by_side|turns] [--micro-tokens 16384] [--kv-share 0.2] [--replicas 1]
        [--stop-every N]

A Qwen2 model of random weights, all of which are trained. Prompts are 48 random letters, a letter a token. Without
--stop-every each response has exactly --max-tokens tokens; with it one token in N ends a response, so that lengths are
geometric, cut at --max-tokens. Rewards count words: they cost what a rule costs. Steps after the first two are counted.

    generation  from the first prompt that is begun to the last response that ends
    reference   its own seconds, beside or within the generation
    update      forward and backward passes and the optimizer's step; the old log-probabilities are the forward pass's
    weights     from the end of the update until the next prompts may be begun: the weights laid out for the engine
    wait        of the update stage for the step's groups
    overhead    of the step, at staleness 0: neither is the update at work nor any stage before it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
import numpy as np
import train_model

from rollstream import (
    GRPO,
    ActorUpdate,
    Correction,
    Graph,
    Placement,
    Prompts,
    RefLogprob,
    Reward,
    Rollout,
    Step,
    grpo,
    reward,
    run,
)

PROMPT_TOKENS = 48
#: Steps that are not counted: compilers and allocators warm up.
WARM = 2


@reward
def even_words(response: str) -> float:
    """Share of words with an even number."""
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A token for each byte, and words that no text is read as: `w300 ` is what token 300 says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({t: i for i, t in enumerate([*bytes_, *(f"w{i}Ġ" for i in range(256, vocab))])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)


def write_prompts(file: Path, num: int, length: int = PROMPT_TOKENS, seed: int = 0) -> Path:
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, (num, length), dtype=np.uint8)
    rows = [{"question": row.tobytes().decode(), "answer": ""} for row in letters]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_graph(given: argparse.Namespace, folder: Path) -> Graph:
    shape = train_model.SHAPES[given.shape]
    model = folder / "model"
    model.mkdir()
    shape.write(model)
    write_tokenizer(model, shape.vocab)
    prompts = write_prompts(folder / "prompts.jsonl", given.prompts * (given.steps + given.staleness + 1))
    common: dict[str, Any] = {
        "model": str(model),
        "random_weights": True,
        "dtype": given.dtype,
        "max_tokens_per_micro_batch": given.micro_tokens,
    }
    stops = tuple(range(shape.vocab // given.stop_every)) if given.stop_every else ()
    engine: dict[str, Any] = {"load_format": "dummy", "max_model_len": PROMPT_TOKENS + given.max_tokens + 16}
    if given.device == "cuda":
        num_requests = given.prompts * given.samples // given.replicas
        engine |= {"gpu_memory_utilization": given.kv_share / given.replicas, "max_num_seqs": num_requests}
        engine |= {"enable_sleep_mode": True} if given.sharing == "turns" else {}
    rollout = Rollout.Config(
        model=str(model),
        n=given.samples,
        max_tokens=given.max_tokens,
        stop_token_ids=stops,
        groups_in_flight=given.prompts // given.replicas,
        seed=None,
        engine="vllm",
        dtype=given.dtype,
        engine_args=engine,
    )
    actor = ActorUpdate.Config(
        groups_per_step=given.prompts,
        lr=1e-6,
        kl_coef=0.001,
        correction=Correction(kind="tis" if given.staleness else "none"),
        offload=("parameters", "gradients", "optimizer") if given.sharing == "turns" else (),
        **common,
    )
    return grpo(
        GRPO(
            name="gpu",
            data=Prompts.Config(path=str(prompts), model=str(model), prompt="question", chat_template=False),
            rollout=rollout,
            reward=Reward.Config(function=even_words),
            ref=RefLogprob.Config(**common),
            actor=actor,
            max_staleness=given.staleness,
        )
    )


def intervals(out: Path) -> dict[int, dict[str, list[tuple[float, float]]]]:
    """By step and stage, when each group was with it: beginning and end."""
    found: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, (out / "groups.jsonl").read_text().splitlines()):
        for leg in line.get("trail", ()):
            found[line["step"]][leg["stage"]].append((leg["begun"], leg["begun"] + leg["seconds"]))
    return found


def parts(step: Step, legs: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Seconds of one step."""
    m, rollouts = step.metrics, legs["rollout"]
    at_work = [span for stage, spans in legs.items() for span in spans if stage != "prompts"]  # those are read ahead
    generation = max(end for _, end in rollouts) - min(begun for begun, _ in rollouts)
    return {
        "step": m["time/step_s"],
        "generation": generation,
        "reference": sum(end - begun for begun, end in legs.get("ref_logprob", ())),
        "wait": m["time/wait_s"],
        "update": m["time/update_s"],
        "weights": m["time/weights_s"],
        "tokens": m["step/tokens"],
        "overhead": m["time/step_s"] - m["time/update_s"] - busy_s(at_work),
        "mismatch": m["rollout/logprob_diff"],
        "kl": m["rollout/mismatch_k3"],
    }


def busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of these goes on."""
    total, end = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(ended - max(begun, end), 0.0)
        end = max(end, ended)
    return total


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with bench.private_cluster("grpo", num_cpus=16, store_bytes=2 * 1024**3) as folder:
        steps: list[Step] = []
        begun = time.monotonic()
        bundle = Placement.colocated(cpus=8, gpus=1 if given.device == "cuda" else 0)
        replicas = {"rollout": given.replicas}
        placement = dataclasses.replace(bundle, sharing=given.sharing, threads=given.threads, replicas=replicas)
        for step in run(
            make_graph(given, folder),
            placement=placement,
            steps=given.steps,
            out=folder / "out",
            save_every=None,
            export=False,
        ):
            steps.append(step)
            print(f"step {step.index} at {time.monotonic() - begun:.0f} s: {dict(brief(step))}", flush=True)
        legs = intervals(folder / "out")
    counted = [parts(step, legs[step.index]) for step in steps[WARM:]]
    means = {name: statistics.mean(c[name] for c in counted) for name in counted[0]}
    shape, response = train_model.SHAPES[given.shape], [s.metrics["rollout/response_tokens"] for s in steps[WARM:]]
    lengths = [PROMPT_TOKENS + round(statistics.mean(response))] * (given.prompts * given.samples)
    flops = shape.step_flops(lengths, round(means["tokens"])) * 4 / 3  # a reference's forward pass beside the three
    return {
        "seconds": means,
        "all steps": [parts(step, legs[step.index]) for step in steps],
        "tokens_per_s": sum(lengths) / means["step"],
        "model_tflops": flops / means["step"] / 1e12,
        "metrics": [dict(step.metrics) for step in steps],
        "stage intervals": {str(k): {n: [list(x) for x in v] for n, v in d.items()} for k, d in legs.items()},
    }


def brief(step: Step) -> Iterator[tuple[str, float]]:
    for name in ("time/step_s", "time/wait_s", "time/update_s", "rollout/tokens_per_s", "rollout/logprob_diff"):
        if name in step.metrics:
            yield name, round(step.metrics[name], 3)


def main() -> None:
    given = arguments()
    results = measure(given)
    seconds, bars = results["seconds"], dict[str, Any]()
    if given.shape == "1.4b" and not given.stop_every:
        bars["step"] = {"value": seconds["step"], "at_most": 27 if given.staleness else 40}
    if not given.staleness:
        bars["overhead"] = {"value": seconds["overhead"] / seconds["step"], "at_most": 0.05}
    bars["mismatch"] = {"value": seconds["mismatch"], "at_most": 0.02}
    bars["kl"] = {"value": seconds["kl"], "at_most": 1e-3}
    print(json.dumps(bench.report(vars(given), ("torch", "megatron-core", "ray", "rollstream"), results, bars)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", choices=train_model.SHAPES, default="1.4b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8, help="of each stage's process, on the CPU")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--stop-every", type=int, default=0)
    parser.add_argument("--sharing", choices=("auto", "side_by_side", "turns"), default="auto")
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--replicas", type=int, default=1, help="of the engine, on the one GPU")
    parser.add_argument("--kv-share", type=float, default=0.2, help="of the GPU's memory, for all engines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
