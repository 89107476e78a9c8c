"""Megatron without CUDA: the one place that knows how.

Megatron-Core asks `torch.cuda` for the current device, random states and streams, and writes device="cuda" in its
schedules. Where there is no CUDA, `prepare` gives those names their CPU meaning, and `on_platform` sends tensors that
ask for CUDA to the CPU. Where there is CUDA, `prepare` leaves those names alone and `on_platform` selects the device.

Both belong to a thread: everything that runs Megatron does so within `on_platform()`, whichever of an actor's threads
it is called on.

    prepare()                       # before the first import of megatron
    with on_platform():
        model(...)
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

#: Imported while `torch.compile` is switched off: Megatron's decorators would otherwise load the whole compiler.
_MEGATRON_MODULES = (
    "megatron.core",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
)

_TORCH_WARNINGS = (
    r".*torch\.distributed.*is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"Please use DTensor instead",
)

_prepared = False
_cuda_index = 0


def choose_device(rank: int) -> None:
    """Which of the visible CUDA devices a rank uses; without CUDA it does nothing."""
    global _cuda_index
    if torch.cuda.is_available():
        _cuda_index = rank % torch.cuda.device_count()


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", _cuda_index) if torch.cuda.is_available() else CPU


def prepare() -> None:
    """Makes Megatron importable here, and quiet. Call it before the first import of megatron; again is free."""
    global _prepared
    if _prepared:
        return
    # With one queue for kernels and copies, collectives start in the order in which Megatron issues them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _quieten()
    if not torch.cuda.is_available():
        _give_cuda_names_a_cpu_meaning()
        _import_without_compiler()
    _prepared = True


@contextlib.contextmanager
def on_platform() -> Generator[None]:
    """Context, or decorator of a method that is no generator, within which Megatron may run."""
    prepare()
    with torch.cuda.device(_cuda_index) if torch.cuda.is_available() else _CudaMeansCpu():
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """Within it, tensors that ask for CUDA land on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs and str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(out, str):
            # Megatron's optimizers compare these names. Within two of these modes it has been done already.
            return out if out.startswith("torch.cuda.") else out.replace("torch.", "torch.cuda.", 1)
        return out


class _NoStream:
    """A CUDA stream that is always done."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *args, **kwargs: self


def _give_cuda_names_a_cpu_meaning() -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def random_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def no_stream(*args: Any, **kwargs: Any) -> _NoStream:
        return _NoStream()

    def in_stream(stream: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def at_once(callback: Callable[[], None], **kwargs: Any) -> None:
        callback()

    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = nothing
    cuda.Stream = _NoStream
    cuda.current_stream = cuda.default_stream = no_stream
    cuda.stream = in_stream
    cuda.get_rng_state = cuda.random.get_rng_state = random_state
    # Without these two the ranks of a tensor-parallel group would draw the same random numbers.
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = at_once
    cuda.default_generators = {CPU: torch.default_generator}


def _import_without_compiler() -> None:
    def as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function if function is not None else as_it_is

    any_torch: Any = torch
    compiler, any_torch.compile = any_torch.compile, as_it_is
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _MEGATRON_MODULES:
                importlib.import_module(name)
    finally:
        any_torch.compile = compiler


def _quieten() -> None:
    """Megatron's warnings are about optional packages and about its own use of torch. Those that torch raises within
    `_CudaMeansCpu` seem to come from there: they are known by their text."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for text in _TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("megatron").setLevel(logging.ERROR)
