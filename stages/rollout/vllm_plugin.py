"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`): makes our weight transfer known."""

from __future__ import annotations

#: The name of the transfer, for vLLM's WeightTransferConfig.
BACKEND = "rollstream"


def register() -> None:
    """Registers the transfer; may be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollstream.stages.rollout.vllm_transfer", "SharedMemoryTransfer"
        )
