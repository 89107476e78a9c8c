"""Optimizer steps on a GPU: packed samples of many lengths, against Megatron with its own attention.

    python benchmarks/gpu_train.py [--json] [--shape 0.5b] [--tokens 32768] [--samples 256] [--longest 4096]
        [--recompute none] [--rounds 3] [--megatron] [--device cuda|cpu]

`ours` is train_step.py's packed way; it says what a step is, what the samples are and how FLOPs are counted. With
--megatron the same model is trained as Megatron-Core has it without extra packages: its local layers and attention,
rectangular micro-batches of 16 sequences of 1,024 tokens, its own loss over all tokens. `product_tflops` is that of a
product of two large matrices in the same process, before and after.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench
import train_model
import train_step

#: Of Megatron's own way.
SEQUENCES, LENGTH, MICRO_BATCHES = 16, 1024, 4


def timed(device: Any, work: Callable[[], Any]) -> float:
    train_model.synchronize(device)
    begun = time.perf_counter()
    work()
    train_model.synchronize(device)
    return time.perf_counter() - begun


def ours(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from rollstream.stages.megatron.cpu_platform import on_platform

    subject = train_step.Bench(given, folder)
    with on_platform():
        before = train_model.product_flops(subject.device, subject.policy.chunks[0].config.params_dtype)
        rounds = [subject.step("packed") for _ in range(given.rounds + 2)][2:]
        after = train_model.product_flops(subject.device, subject.policy.chunks[0].config.params_dtype)
        memory = parts_of_memory(subject)
        step_s = statistics.median(r["step_s"] for r in rounds)
        flops = subject.shape.step_flops(subject.lengths, subject.num_scored)
    num_tokens = sum(subject.lengths)
    subject.stage.close()
    return {
        "tflops": flops / step_s / 1e12,
        "tokens_per_s": num_tokens / step_s,
        "step_s": step_s,
        "tokens": num_tokens,
        "rounds": rounds,
        "product_tflops": [before / 1e12, after / 1e12],
        "peak_gigabytes": memory,
    }


def parts_of_memory(subject: train_step.Bench) -> dict[str, float]:
    """What one more step takes at most of the GPU, in GB (1e9 bytes). Activations are what is held when the output
    layer begins, with the longest pack; the rest of the peak is logits and what the kernels need."""
    import torch

    if subject.device.type != "cuda":
        return {}
    trainer, chunk = subject.trainer, subject.policy.chunks[0]
    held: list[int] = []
    handle = chunk.output_layer.register_forward_pre_hook(lambda *_: held.append(torch.cuda.memory_allocated()))
    idle = torch.cuda.memory_allocated()
    train_model.reset_peak_memory(subject.device)
    subject.step("packed")
    handle.remove()
    peak = torch.cuda.max_memory_allocated()
    weights = sum(p.nbytes for p in chunk.parameters())
    gradients = sum(buffer.grad_data.nbytes for chunk in trainer.ddp for buffer in chunk.buffers)
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": idle - weights - gradients,
        "activations": max(held) - idle,
        "logits": peak - max(held),
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved(),
    }
    return {name: value / 1e9 for name, value in parts.items()}


def megatron(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Megatron's own model, schedule, loss and optimizer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rollstream import ActorUpdate
    from rollstream.stages.base import World
    from rollstream.stages.megatron import cpu_platform, hf_config, parallel
    from rollstream.stages.megatron.optimizer import build_optimizer
    from rollstream.stages.megatron.transformer import transformer_config

    shape, device = train_model.SHAPES[given.shape], cpu_platform.device()
    settings = ActorUpdate.Config(
        model=str(shape.write(folder)), random_weights=True, dtype=given.dtype, groups_per_step=1
    )
    parallel.init(World(threads=given.threads), settings.layout, 0)
    config = transformer_config(hf_config.read(Path(settings.model)), settings)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config, spec, shape.vocab, LENGTH, position_embedding_type="rope", share_embeddings_and_output_weights=True
    )
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, reduction, model.to(device))
    optimizer = build_optimizer([ddp], settings)
    ids = torch.randint(0, shape.vocab, (SEQUENCES, LENGTH + 1), device=device)
    positions = torch.arange(LENGTH, device=device).expand(SEQUENCES, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)

    def forward(_: Iterator[Any], chunk: Any) -> tuple[Any, Callable[[Any], Any]]:
        losses = chunk(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous())
        return losses, lambda out: (out.float().mean(), {})

    def step() -> None:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(()), model=[ddp], num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH, micro_batch_size=SEQUENCES, forward_only=False,
        )  # fmt: skip
        optimizer.step()

    times = [timed(device, step) for _ in range(given.rounds + 1)][1:]
    lengths = [LENGTH] * SEQUENCES * MICRO_BATCHES
    flops = shape.step_flops(lengths, sum(lengths))
    parallel.destroy()
    return {"tflops": flops / statistics.median(times) / 1e12, "step_s": statistics.median(times), "rounds": times}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    from rollstream.stages.megatron.cpu_platform import on_platform

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="train") as folder:
        results["ours"] = ours(given, Path(folder))
        if given.megatron:
            with on_platform():
                results["megatron"] = megatron(given, Path(folder))
            results["ours/megatron"] = results["ours"]["tflops"] / results["megatron"]["tflops"]
    return results


def main() -> None:
    given = arguments()
    results = measure(given)
    at_least = {"0.5b": 270, "3b": 350}
    bars: dict[str, Any] = {}
    if given.shape in at_least:
        bars["tflops"] = {"value": results["ours"]["tflops"], "at_least": at_least[given.shape]}
    if given.megatron:
        bars["ours/megatron"] = {"value": results["ours/megatron"], "at_least": 1.8}
    print(json.dumps(bench.report(vars(given), ("torch", "megatron-core", "rollstream"), results, bars)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", choices=train_model.SHAPES, default="0.5b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    number = functools.partial(parser.add_argument, type=int)
    number("--tokens", default=32768)
    number("--samples", default=256)
    number("--longest", default=4096)
    number("--rounds", default=3)
    number("--threads", default=8)
    number("--seed", default=0)
    parser.add_argument("--recompute", choices=train_step.RECOMPUTE, default="none")
    parser.add_argument("--megatron", action="store_true", help="Megatron's own way too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
