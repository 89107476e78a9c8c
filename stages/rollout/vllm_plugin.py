"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`): makes our weight transfer known."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

#: Linux sends a process this signal when its parent ends.
PR_SET_PDEATHSIG = 1
#: The name of the transfer, for vLLM's WeightTransferConfig.
BACKEND = "rollstream"


def register() -> None:
    """Registers the transfer, and sees to it that vLLM's processes end with the one that started them. May be called
    again."""
    if multiprocessing.parent_process() is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it ended before this
            os._exit(1)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollstream.stages.rollout.vllm_transfer", "SharedMemoryTransfer"
        )
