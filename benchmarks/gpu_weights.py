"""New weights from the trainer to vLLM on one GPU, in seconds, against a copy of as many bytes.

    python benchmarks/gpu_weights.py [--json] [--shape 3b] [--rounds 4]

A Qwen2 model of random weights in bfloat16; the 7b shape trains adapters, the others all weights. A round is

    share   the update stage lays its weights out for readers
    load    the engine takes them in, and is ready to generate
    token   then a first token

`copy` is that of the same number of bytes from one place on the GPU to another. Then the engine rests, and wakes with
new weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import bench
import train_model

from rollstream import ActorUpdate, Lora
from rollstream.stages.base import World
from rollstream.stages.rollout.engine import Request, Sampling, generate

#: Beside twice the copy's time.
ALLOWED_S = 0.3


def make_engine(folder: str) -> Any:
    from rollstream.stages.rollout.vllm_engine import VllmEngine

    args: dict[str, Any] = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 1024}
    return VllmEngine(
        folder,
        dtype="bfloat16",
        stage="rollout",
        sampling=Sampling(max_tokens=1),
        updates="resume",
        timeout_s=120.0,
        check_weights=False,
        args=args | {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True},
    )


def copy_s(num_bytes: int) -> float:
    import torch

    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    times: list[float] = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    del source, target
    torch.cuda.empty_cache()
    return statistics.median(times[1:])


def one_token(engine: Any, name: str) -> None:
    request = Request(request_id=name, prompt_ids=[5, 6, 7], sample_ids=[name], sampling=Sampling(max_tokens=1))
    assert list(generate(engine, [request], timeout_s=60))


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch

    shape = train_model.SHAPES[given.shape]
    model = str(shape.write(folder))
    engine = make_engine(model)
    lora = Lora(rank=16) if given.shape == "7b" else None
    config = ActorUpdate.Config(model=model, random_weights=True, dtype="bfloat16", groups_per_step=1, lora=lora)
    stage = ActorUpdate(config)
    stage.setup(World(threads=8))
    rounds: list[dict[str, float]] = []
    num_bytes = 0
    for version in range(1, given.rounds + 2):
        marks = [time.perf_counter()]
        shared = stage.share_weights(version)
        assert shared is not None
        marks.append(time.perf_counter())
        assert engine.load_shared_weights(shared)
        marks.append(time.perf_counter())
        one_token(engine, str(version))
        marks.append(time.perf_counter())
        num_bytes = shared.num_bytes
        rounds.append(dict(zip(("share", "load", "token"), (b - a for a, b in itertools.pairwise(marks)), strict=True)))
    free, _ = torch.cuda.mem_get_info()
    begun = time.perf_counter()
    engine.rest()
    rest_s = time.perf_counter() - begun
    freed = torch.cuda.mem_get_info()[0] - free
    begun = time.perf_counter()
    shared = stage.share_weights(100)
    assert shared is not None
    assert engine.load_shared_weights(shared)
    wake_s = time.perf_counter() - begun
    one_token(engine, "awake")
    engine.close()
    stage.close()
    medians = {name: statistics.median(r[name] for r in rounds[1:]) for name in rounds[0]}
    copied = copy_s(num_bytes)
    return {
        "gigabytes": num_bytes / 1e9,
        "copy_s": copied,
        **{f"{name}_s": value for name, value in medians.items()},
        "flow_s": medians["share"] + medians["load"],
        "allowed_s": 2 * copied + ALLOWED_S,
        "rest_s": rest_s,
        "freed_gigabytes": freed / 1e9,
        "wake_s": wake_s,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", choices=train_model.SHAPES, default="3b")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weights") as folder:
        results = measure(given, Path(folder))
    bars = {"flow_s": {"value": results["flow_s"], "at_most": results["allowed_s"]}}
    print(json.dumps(bench.report(vars(given), ("vllm", "torch", "megatron-core", "rollstream"), results, bars)))


if __name__ == "__main__":
    main()
