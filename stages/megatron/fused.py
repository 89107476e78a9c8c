"""Chains of elementwise operations as one kernel, where there is a GPU: torch's compiler writes it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def fused_on_gpu(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: compiled for any sizes when its first argument is on a GPU, else run as it is written.

    The kernel computes in float32 and rounds once, where the operations by themselves would round one by one. It is
    made at the first call, in seconds, and kept among torch's files for later processes.
    """
    compiled: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal compiled
        first: object = args[0]
        if not (isinstance(first, torch.Tensor) and first.is_cuda and can_compile()):
            return function(*args, **kwargs)
        if compiled is None:
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a pool of processes, for a few kernels
            compiled = torch.compile(function, dynamic=True)
        return compiled(*args, **kwargs)

    return call


@functools.cache
def can_compile() -> bool:
    """Whether Triton is there, and the C compiler that it calls."""
    from torch.utils._triton import has_triton

    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return has_triton() and any(shutil.which(name) for name in compilers if name)
