"""Weights for vLLM's workers by way of shared memory. Runs in vLLM's own processes.

    start_weight_update    the model's layers are opened for new weights
    update_weights         one file of tensors in Hugging Face names, checked, or the update stage's own buffer, in a
                           file or on the worker's GPU (CUDA IPC): read by each worker, its shard kept
    finish_weight_update   the layers are closed: repacked as the kernels want them

vLLM's own transfers (CUDA IPC, NCCL) need a sender that waits for the workers, and a GPU. These serve engines that
start late, senders that go on or end, and a CPU.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollstream.stages.shared_weights import BUFFER


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """A safetensors file, and the CRC-32 of some tensors, in this file or another, by name; or SharedWeights as a
    dictionary."""

    path: str = ""
    checksums: dict[str, int] = field(default_factory=lambda: {})
    shared: dict[str, Any] | None = None


class SharedMemoryTransfer(WeightTransferEngine[Init, Update]):
    """See the module's text."""

    init_info_cls = Init
    update_info_cls = Update
    _opened: tuple[Any, torch.Tensor] | None = None  # a buffer of the update stage, which stays the same while it lives

    def init_transfer_engine(self, init_info: Init) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Any) -> None:
        """Raises ValueError where a tensor is not what was sent. vLLM's own method waits for an accelerator, which a
        CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the file goes away when this returns

    def receive_weights(self, update_info: Update) -> None:
        model: Any = self.model
        if update_info.shared is not None:
            buffer, shared = self._open(update_info.shared), update_info.shared
            with torch.inference_mode():
                model.load_weights((place["name"], _part(buffer, place)) for place in shared["tensors"])
            return
        with torch.inference_mode(), safe_open(update_info.path, "pt") as file:
            for name in update_info.checksums.keys() & set(file.keys()):
                check(name, file.get_tensor(name), update_info.checksums[name])
            model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def _open(self, shared: dict[str, Any]) -> torch.Tensor:
        """The buffer, as bytes."""
        if self._opened is None or self._opened[0] != shared["folder"]:
            self._opened = None
            size, handle = shared["num_bytes"], shared["handle"]
            if handle is None:
                path = f"{shared['folder']}/{BUFFER}"
                buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            else:
                as_bytes = (torch.Tensor, (size,), (1,), 0, torch.UntypedStorage, torch.uint8)
                buffer = rebuild_cuda_tensor(*as_bytes, self.device.index, *handle)
            self._opened = shared["folder"], buffer
        return self._opened[1]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        modules: Any = self.model.modules()
        for module in modules:
            # On a CPU an output layer tied to the embedding would go on with the product prepared for the old weights.
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """vLLM 0.26 asks that it is there. Nobody calls it: the stage itself sends."""


def _part(buffer: torch.Tensor, place: dict[str, Any]) -> torch.Tensor:
    part = buffer[place["start"] : place["start"] + place["num_bytes"]]
    return part.view(getattr(torch, place["dtype"])).view(place["shape"])


def check(name: str, tensor: torch.Tensor, sent: int) -> None:
    """Raises ValueError unless the CRC-32 of the tensor's bytes is the one that was sent."""
    if (found := zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())) != sent:
        raise ValueError(f"{name} arrived changed: CRC-32 {found:08x} where {sent:08x} was sent")
