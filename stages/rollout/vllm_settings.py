"""Settings of vLLM's engine: the ones that a stage sets itself, those it passes on, and the names that vLLM knows.

Nothing here imports vLLM, which takes seconds: the driver checks names by reading vLLM's source.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rollstream.stages.memory import Memory
from rollstream.stages.names import known_names
from rollstream.stages.rollout.engine import Sampling

#: How weights are replaced while requests are under way; the version of each token is recorded either way.
#:   between     they are not: no new request begins until all have ended
#:   resume      requests are cut off and go on with the new weights, their past computed again
#:   recompute   the same inside vLLM, which pauses them; tokens are handed over one by one
#:   keep        they are paused and go on, their past (KV cache) kept from the old weights
WEIGHT_UPDATES = ("between", "resume", "recompute", "keep")

#: vLLM's settings that follow from the stage's own, and from what.
OWN = {
    "model": "model",
    "dtype": "dtype",
    "skip_tokenizer_init": "the stage, which hands over token ids",
    "logprobs_mode": "temperature, top_p and top_k",
    "weight_transfer_config": "the stage",
    "tokenizer": "model",
}
#: Of a GPU's memory, where gpu_memory_utilization does not say; vLLM's own is 0.9 or a little more, by its release.
GPU_SHARE = 0.92
#: Memory for keys and values on a CPU at least, where a sequence of full length does not need more.
CPU_KV_BYTES = 256 * 1024**2
#: Sizes of attention heads that vLLM's CPU kernels know: at another one its core ends with the first token.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
#: Tokens of one forward pass on a CPU at most, where a sequence of full length does not need more.
CPU_BATCHED_TOKENS = 8192


def is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def faults(model: str, args: Mapping[str, Any], sampling: Sampling) -> list[str]:
    """Everything wrong that can be seen without starting vLLM, one sentence each."""
    if importlib.util.find_spec("vllm") is None:
        return [
            "engine='vllm' needs vLLM, which is not installed: pip install 'rollstream[cpu]' for a machine without a "
            "GPU, 'rollstream[vllm]' for one with"
        ]
    found = [f"engine_args: {name} is set by {OWN[name]}: leave it out" for name in args if name in OWN]
    names = known_args()
    found += [
        f"engine_args: vLLM has no setting {name!r}: {_nearest(name, names)}"
        for name in args
        if names and name not in names
    ]
    head_dim = _head_dim(_read_config(model))
    if is_cpu_build() and head_dim not in CPU_HEAD_DIMS:
        found.append(
            f"vLLM's CPU build computes attention heads of {', '.join(map(str, CPU_HEAD_DIMS))} values, this model's "
            f"have {head_dim}: use engine='transformers', or another model"
        )
    truncated = sampling.top_p < 1 or sampling.top_k is not None
    if truncated and sampling.temperature not in (0, 1):
        found.append(
            f"with top_p={sampling.top_p} and top_k={sampling.top_k} vLLM gives log-probabilities at temperature 1 "
            f"only, got temperature={sampling.temperature}: draw from all tokens (top_p=1, top_k=None), set "
            "temperature=1, or use engine='transformers'"
        )
    return found


@cache
def known_args() -> frozenset[str]:
    """Fields of the installed vLLM's AsyncEngineArgs, read from its source; empty where they are not found there."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    path = Path(spec.submodule_search_locations[0]) / "engine/arg_utils.py"
    if not path.is_file():
        return frozenset()
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        line.target.id
        for node in classes
        if node.name in ("EngineArgs", "AsyncEngineArgs")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


def num_devices(args: Mapping[str, Any]) -> int:
    """Devices of one engine."""
    return int(args.get("tensor_parallel_size", 1)) * int(args.get("pipeline_parallel_size", 1))


def memory(args: Mapping[str, Any], device_bytes: int) -> Memory:
    """What the engine takes of each of its devices, all of it: weights, keys and values, and room to compute."""
    share = float(args.get("gpu_memory_utilization", GPU_SHARE))
    sleeps = bool(args.get("enable_sleep_mode"))
    return Memory(
        parts={"engine": int(share * device_bytes)},
        freed={"engine"} if sleeps else frozenset(),
        could_free="" if sleeps else "engine_args={'enable_sleep_mode': True}",
    )


def engine_args(
    model: str, dtype: str, sampling: Sampling, given: Mapping[str, Any], *, on_gpu: bool
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs, less `weight_transfer_config`; `given` are the user's."""
    truncated = sampling.top_p < 1 or sampling.top_k is not None
    args: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # Of logits / temperature over all tokens: before top-p and top-k, as a trainer computes them again.
        "logprobs_mode": "raw_logprobs" if truncated else "processed_logprobs",
    }
    if not on_gpu:
        config = _read_config(model)
        length = given.get("max_model_len") or config.get("max_position_embeddings", 2048)
        args |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": cpu_kv_bytes(config, length),
            # vLLM 0.29 ends on a prompt that is cut in parts if the request has a seed: no such generator on a CPU.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, length),
        }
    return args | dict(given)


def cpu_kv_bytes(config: Mapping[str, Any], length: int) -> int:
    """Bytes for keys and values: two sequences of full length, in float32, or CPU_KV_BYTES if that is more."""
    kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads", 1)
    per_token = 2 * 4 * config.get("num_hidden_layers", 1) * kv_heads * _head_dim(config)
    return max(CPU_KV_BYTES, 2 * per_token * (length + 256))


def prepare_environment(*, on_gpu: bool) -> None:
    """Sets what vLLM reads from the environment when it is imported; what the user set stands."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    }
    if not on_gpu:
        settings |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the core's process, not in one more
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would be bound to the same cores
        }
    if importlib.util.find_spec("flashinfer") is None:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # without it vLLM would look for it, and end
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _read_config(model: str) -> Mapping[str, Any]:
    return json.loads((Path(model) / "config.json").read_text())


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or math.ceil(config.get("hidden_size", 1) / config.get("num_attention_heads", 1))


def _nearest(name: str, names: frozenset[str]) -> str:
    """The nearest names; vLLM has some two hundred."""
    near = known_names(name, names)
    return near.split(" Known:")[0] if near.startswith("did you mean") else "see the fields of vLLM's AsyncEngineArgs"
