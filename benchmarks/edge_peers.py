"""Two other ways to bring rollouts from one process to another, where they are installed:

    TransferQueue    kv_batch_put -> its storage unit -> kv_batch_get, kv_clear
    DataProto        verl's container of tensors, the answer of an actor call, as its own pickling makes it

They get their best case: dense tensors without padding, and WINDOW calls open at once. They need packages that must
not be mixed with ours, so they come from a folder of their own, which only these two actors have on their path:

    pip install --target FOLDER --no-deps TransferQueue verl tensordict==0.10.0 pyzmq hydra-core omegaconf \
        antlr4-python3-runtime==4.9.3 msgspec codetiming torchdata pyvers orjson prometheus_client importlib_metadata
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from edge_routes import CALL_S, NUM_ROWS, TOKEN_COLUMNS, WINDOW, Passed, make_batch

PARTITION = "edges"


class PeerProducer:
    """Has one batch of each size as tensors."""

    def __init__(self, sizes: Sequence[int]):
        import torch

        def tensors(size: int) -> dict[str, Any]:
            batch = make_batch(size)
            return {
                name: torch.from_numpy(batch.column(name).values.to_numpy().copy()).view(NUM_ROWS, -1)
                for name in TOKEN_COLUMNS
            }

        self._tensors = {size: tensors(size) for size in sizes}
        self._made = 0

    def start_queue(self) -> str:
        """TransferQueue's own actors; its version."""
        import transfer_queue

        transfer_queue.init()
        return transfer_queue.__version__

    def start_proto(self) -> str:
        """The version of verl."""
        import verl

        return verl.__version__

    def put(self, size: int) -> tuple[float, Any]:
        """When it began, and what TransferQueue knows the rows by."""
        import transfer_queue
        from tensordict import TensorDict

        sent = time.time()
        self._made += 1
        keys = [f"{self._made}.{row}" for row in range(NUM_ROWS)]
        fields = TensorDict(self._tensors[size], batch_size=NUM_ROWS)
        return sent, transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)

    def proto(self, size: int) -> tuple[float, Any]:
        from verl import DataProto

        return time.time(), DataProto.from_dict(tensors=self._tensors[size])


class PeerConsumer:
    """Takes batches from a `PeerProducer`, and looks at both ends of each."""

    def __init__(self, producer: Any):
        self._producer = producer

    def start_queue(self) -> None:
        import transfer_queue

        transfer_queue.init()

    def transfer_queue(self, size: int, num: int) -> Passed:
        import transfer_queue

        def take(meta: Any) -> None:
            _check(transfer_queue.kv_batch_get_by_meta(meta))
            transfer_queue.kv_clear(keys=meta.keys, partition_id=PARTITION)

        return self._take(self._producer.put, size, num, take)

    def data_proto(self, size: int, num: int) -> Passed:
        return self._take(self._producer.proto, size, num, lambda proto: _check(proto.batch))

    def _take(self, method: Any, size: int, num: int, look: Callable[[Any], None]) -> Passed:
        begun, passed = time.perf_counter(), Passed()
        calls = [method.remote(size) for _ in range(min(WINDOW, num))]
        for index in range(num):
            sent, got = ray.get(calls.pop(0), timeout=CALL_S)
            if index + WINDOW < num:
                calls.append(method.remote(size))
            look(got)
            passed.latencies_s.append(time.time() - sent)
            del got
        passed.seconds = time.perf_counter() - begun
        return passed


def _check(tensors: Any) -> None:
    ids = tensors["response_ids"]
    assert ids.shape[0] == NUM_ROWS
    assert (int(ids[0, 0]), int(ids[-1, -1])) == (0, ids.numel() - 1)
