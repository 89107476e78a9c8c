"""What train_step.py trains: shapes of models, samples of many lengths, and what their arithmetic amounts to."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Multiplications and additions of 16-bit matrix products a second, dense, as the maker states them.
DATASHEET_PEAKS = {"H100": 989e12, "H200": 989e12}
VOCAB = 151936
PROMPT_TOKENS = 16
#: Of the lognormal that response lengths are drawn from: its median is a sixteenth of the longest.
LENGTH_SIGMA = 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2 model; where it is tied, its embedding is its output layer too."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = VOCAB
    tied: bool = True

    def write(self, folder: Path) -> Path:
        """config.json, which is all that random weights need."""
        settings = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": self.tied,
        }
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    @property
    def layer_parameters(self) -> int:
        """Entries of the matrices of all layers."""
        size = self.hidden // self.heads
        attention = self.hidden * size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    def step_flops(self, lengths: Sequence[int], num_scored: int) -> float:
        """Of one forward and backward pass over sequences of these lengths, `num_scored` tokens of which are scored."""
        matrices = 6 * self.layer_parameters * sum(lengths) + 6 * self.vocab * self.hidden * num_scored
        return matrices + 6 * self.layers * self.hidden * sum(length**2 for length in lengths)


SHAPES = {
    "tiny": Shape(hidden=256, ffn=1024, layers=4, heads=4, kv_heads=2, vocab=2048),
    "0.5b": Shape(hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2),
    "1.4b": Shape(hidden=1536, ffn=8960, layers=28, heads=12, kv_heads=2, vocab=49152),
    "1.5b": Shape(hidden=1536, ffn=8960, layers=28, heads=12, kv_heads=2),
    "3b": Shape(hidden=2048, ffn=11008, layers=36, heads=16, kv_heads=2),
    "7b": Shape(hidden=3584, ffn=18944, layers=28, heads=28, kv_heads=4, vocab=152064, tied=False),
}


def make_samples(num: int, longest: int, vocab: int, seed: int) -> list[Any]:
    """Samples in the order in which they came: response lengths are lognormal up to `longest`, and one is that long."""
    from rollstream.stages.megatron.batch import Sample

    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(longest / 16), LENGTH_SIGMA, num)).astype(int), 1, longest)
    lengths[num // 2] = longest
    return [
        Sample(
            sample_id=f"s{index}",
            prompt_ids=rng.integers(0, vocab, PROMPT_TOKENS),
            response_ids=rng.integers(0, vocab, length),
            columns={
                "loss_mask": np.ones(length, np.bool_),
                "advantages": np.full(length, rng.normal(), np.float32),
                "rollout_logprobs": np.full(length, -np.log(vocab), np.float32),
            },
        )
        for index, length in enumerate(lengths)
    ]


def pad_responses(samples: Sequence[Any], width: int) -> list[Any]:
    """The same samples, each response filled up to `width` with tokens that are not trained on."""
    from rollstream.stages.megatron.batch import Sample

    def filled(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros(width - len(values), values.dtype)])

    return [
        Sample(
            sample_id=s.sample_id,
            prompt_ids=s.prompt_ids,
            response_ids=filled(s.response_ids),
            columns={name: filled(values) for name, values in s.columns.items()},
        )
        for s in samples
    ]


def product_flops(device: Any, dtype: Any) -> float:
    """Of the fastest of a few products of two square matrices, a second."""
    import torch

    size = 8192 if device.type == "cuda" else 2048
    left, right, product = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(3))
    times: list[float] = []
    for _ in range(5):
        synchronize(device)
        begun = time.perf_counter()
        torch.mm(left, right, out=product)
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return 2 * size**3 / min(times)


def peak_flops(device: Any, dtype: Any, measured: Sequence[float]) -> tuple[float, str]:
    """The most that this device does in a second, and how that is known: from a datasheet, else the best measured."""
    import torch

    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, peak in DATASHEET_PEAKS.items():
            if part in name:
                return peak, f"dense 16-bit products of {part}, as its maker states"
    return max(measured), "the fastest product of two large square matrices among the rounds"


def synchronize(device: Any) -> None:
    """Waits until the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: Any) -> None:
    """Begins to watch for the most memory in use; on the CPU that is Linux's."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: Any) -> int:
    """The most memory in use since: what torch has allocated on a GPU, resident memory of the process on the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
