"""One optimizer step of the actor update: how much of the machine it uses, and packed against padded micro-batches.

    python benchmarks/train_step.py [--json] [--shape tiny|0.5b|1.5b|3b] [--dtype float32|bfloat16] [--tokens 4096]
        [--samples 64] [--longest 512] [--recompute none|selective|full] [--device auto|cpu|cuda] [--rounds 5]

A model of random weights, one rank, samples of heavy-tailed lengths (lognormal, mean about a tenth of the longest). A
step is: making micro-batches, forward and backward passes, the optimizer's step. Two ways, in turns, in one process:

    packed  as the actor does: samples are laid end to end, up to --tokens in a micro-batch
    padded  as trainers without packing do: a fixed number of samples in a micro-batch, in the order in which they
            came, each response filled up with untrained tokens to the longest among them. The number is the largest
            that stays within --tokens wherever the longest response falls: one budget for both ways.

Both run the same code but for that; their gradients are compared, for both must train the same. Figures
are medians over the rounds, after one that is not counted.

FLOPs are those of the model, forward and backward, of real tokens only; what is computed anew in the backward pass is
not counted. With T tokens in all, R response tokens, L tokens in a sequence, N entries in the layers' matrices:

    6 * N * T  +  6 * vocabulary * hidden * R  +  6 * layers * hidden * sum of L^2

The second is the output layer, which sees response tokens alone; the third is attention, the half of it that is causal.
`mfu` is that over the step's time and the peak, which `peak` names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench
import train_model

RECOMPUTE = ("none", "selective", "full")
MODES = ("packed", "padded")


class Bench:
    """An actor in this process, and the same samples to train on in either way."""

    def __init__(self, given: argparse.Namespace, folder: Path):
        from rollstream.stages.actor import ActorUpdate
        from rollstream.stages.base import World
        from rollstream.stages.megatron import cpu_platform

        self.given, self.shape = given, train_model.SHAPES[given.shape]
        self.config = ActorUpdate.Config(
            model=str(self.shape.write(folder)),
            random_weights=True,
            dtype=given.dtype,
            groups_per_step=1,
            max_tokens_per_micro_batch=given.tokens,
            recompute=given.recompute,
        )
        self.stage = ActorUpdate(self.config)
        self.stage.setup(World(threads=given.threads))
        self.trainer: Any = self.stage.session._trainer
        self.policy: Any = self.stage.session._policy
        self.device = cpu_platform.device()
        self.samples = train_model.make_samples(given.samples, given.longest, self.shape.vocab, given.seed)
        self.lengths = [sample.num_tokens for sample in self.samples]
        self.num_scored = sum(len(sample.response_ids) for sample in self.samples)
        self.per_padded = given.tokens // max(self.lengths)

    def batches(self, mode: str) -> list[Any]:
        """The micro-batches of a step."""
        from rollstream.stages.megatron.batch import pack
        from rollstream.stages.megatron.policy_update import COLUMNS

        if mode == "packed":
            return self.policy.pack(self.samples, self.policy.cut(self.samples), COLUMNS)
        made: list[Any] = []
        for start in range(0, len(self.samples), self.per_padded):
            chunk = self.samples[start : start + self.per_padded]
            made.append(pack(train_model.pad_responses(chunk, max(len(s.response_ids) for s in chunk)), COLUMNS))
        return made

    def forward_backward(self, batches: Sequence[Any]) -> None:
        from rollstream.stages.megatron.objective import Denominators, Objective

        counts = Denominators(num_tokens=self.num_scored, num_samples=len(self.samples))
        loss = Objective(settings=self.config, denominators=counts, compare_rollout=True)
        self.trainer.forward_backward(batches, loss)

    def gradient_difference(self) -> float:
        """Norm of the difference between both ways' gradients, over their norm; the weights stay."""
        buffers = [buffer.grad_data for chunk in self.trainer.ddp for buffer in chunk.buffers]
        self.forward_backward(self.batches("packed"))
        wanted = [gradients.clone() for gradients in buffers]
        self.forward_backward(self.batches("padded"))
        difference = sum(float((g - w).norm()) ** 2 for g, w in zip(buffers, wanted, strict=True))
        return (difference / sum(float(w.norm()) ** 2 for w in wanted)) ** 0.5

    def step(self, mode: str) -> dict[str, float]:
        """Seconds of each part of one step, and the most memory in use."""
        train_model.reset_peak_memory(self.device)
        batches, pack_s = self.timed(lambda: self.batches(mode))
        _, forward_backward_s = self.timed(lambda: self.forward_backward(batches))
        _, optimizer_s = self.timed(self.trainer.step)
        parts = {"pack_s": pack_s, "forward_backward_s": forward_backward_s, "optimizer_s": optimizer_s}
        return {"step_s": sum(parts.values()), **parts, "peak_bytes": train_model.peak_memory_bytes(self.device)}

    def output_layer(self, batches: Sequence[Any]) -> None:
        """The output layer alone, forward and backward, from hidden states to log-probabilities."""
        import torch

        from rollstream.stages.megatron.output import Wanted

        chunk = self.policy.chunks[0]
        for batch in batches:
            shape = (batch.input_ids.shape[1], 1, self.shape.hidden)
            hidden = torch.randn(shape, dtype=chunk.config.params_dtype, device=self.device, requires_grad=True)
            chunk.output_layer.wanted = Wanted(
                rows=batch.rows, labels=batch.labels, temperature=1.0, vocab_size=self.shape.vocab
            )
            scores, _ = chunk.output_layer(hidden, weight=chunk.shared_embedding_or_output_weight())
            scores[..., 0].sum().backward()

    def timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        train_model.synchronize(self.device)
        begun = time.perf_counter()
        result = work()
        train_model.synchronize(self.device)
        return result, time.perf_counter() - begun


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from rollstream.stages.megatron.cpu_platform import on_platform

    load_before = os.getloadavg()[0]
    subject = Bench(given, folder)
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    output_s: list[float] = []
    peaks: list[float] = []
    dtype = subject.policy.chunks[0].config.params_dtype
    with on_platform():
        difference = subject.gradient_difference()
        for turn in range(given.rounds + 1):
            for mode in MODES if turn % 2 == 0 else MODES[::-1]:
                seen[mode].append(subject.step(mode))
            packed = subject.batches("packed")
            output_s.append(subject.timed(lambda batches=packed: subject.output_layer(batches))[1])
            peaks.append(train_model.product_flops(subject.device, dtype))
        peak, source = train_model.peak_flops(subject.device, dtype, peaks)
        results = {mode: summary(subject, mode, seen[mode][1:], peak) for mode in MODES}
    subject.stage.close()
    return {
        **results,
        "packed_over_padded": results["packed"]["tokens_per_s"] / results["padded"]["tokens_per_s"],
        "output_layer_s": statistics.median(output_s[1:]),
        "gradient_difference": difference,
        "tokens": sum(subject.lengths),
        "scored_tokens": subject.num_scored,
        "longest_over_mean": max(subject.lengths) * len(subject.lengths) / sum(subject.lengths),
        "samples_per_padded_micro_batch": subject.per_padded,
        "peak": {"tflops": peak / 1e12, "is": source},
        "load": {"before": load_before, "after": os.getloadavg()[0]},
    }


def summary(subject: Bench, mode: str, rounds: Sequence[dict[str, float]], peak: float) -> dict[str, float]:
    """Medians of one way's rounds, and what follows from them."""
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    batches = subject.batches(mode)
    flops_per_s = subject.shape.step_flops(subject.lengths, subject.num_scored) / medians["step_s"]
    return {
        **medians,
        "tokens_per_s": sum(subject.lengths) / medians["step_s"],
        "tflops": flops_per_s / 1e12,
        "mfu": flops_per_s / peak,
        "padding": 1 - sum(subject.lengths) / sum(batch.input_ids.shape[1] for batch in batches),
        "micro_batches": len(batches),
    }


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="train") as folder:
        results = measure(given, Path(folder))
    bars = {
        "packed_over_padded": {"value": results["packed_over_padded"], "at_least": 1.5},
        "gradient_difference": {
            "value": results["gradient_difference"],
            "at_most": 1e-5 if given.dtype == "float32" else 1e-1,
        },
    }
    report = bench.report(vars(given), ("torch", "megatron-core", "rollstream"), results, bars)
    if not given.json:
        for mode in MODES:
            r = results[mode]
            print(
                f"{mode}  {r['step_s']:.3f} s, {r['tokens_per_s']:.0f} tok/s, {r['tflops']:.3f} TFLOP/s, "
                f"MFU {r['mfu']:.1%}, padding {r['padding']:.1%}, {r['peak_bytes'] / 2**30:.2f} GiB"
            )
        print(f"packed over padded {results['packed_over_padded']:.2f}")
    print(json.dumps(report))


def arguments() -> argparse.Namespace:
    """The settings, those that depend on the device filled in. Chooses the device, so torch is loaded only after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shape", choices=train_model.SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default bfloat16 on a GPU")
    parser.add_argument("--tokens", type=int, help="of a micro-batch at most; by default 4096, on a GPU 32768")
    parser.add_argument("--samples", type=int, help="of a step; by default 64, on a GPU 256")
    parser.add_argument("--longest", type=int, help="response; by default an eighth of --tokens")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    has_gpu = torch.cuda.is_available()
    if given.device == "cuda" and not has_gpu:
        sys.exit("--device cuda: torch sees no GPU here")
    given.device = "cuda" if has_gpu else "cpu"
    given.dtype = given.dtype or ("bfloat16" if has_gpu else "float32")
    given.tokens = given.tokens or (32768 if has_gpu else 4096)
    given.samples = given.samples or (256 if has_gpu else 64)
    given.longest = given.longest or given.tokens // 8
    if given.longest + train_model.PROMPT_TOKENS > given.tokens:
        sys.exit(f"--longest {given.longest} with a prompt does not fit into --tokens {given.tokens}")
    return given


if __name__ == "__main__":
    main()
