"""The ways from one process to another that `edges.py` compares: a producer, a consumer, and what is between them.

    Producer --ray.put------------------------> Consumer     limit, limit_pipelined, put_and_get
    Producer --produce--> EdgeActor --lease---> Consumer     edge, edge_journalled
    Producer --Queue.put--> Queue --Queue.get-> Consumer     queue, pickled

A route is a method of `Consumer`: it takes a number of batches of one size and gives a `Passed`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from rollstream.graphs.edge_actor import Lease
from rollstream.graphs.fetch import fetch
from rollstream.graphs.item import Item, Leg, Part

CALL_S = 120.0
#: Groups that a consumer of an edge leases at a time.
AT_MOST = 4
#: Groups after which they are retired, as a step retires those that it trained.
RETIRE_EVERY = 4
#: Calls that are open at once on pipelined routes.
WINDOW = 4
TOKEN_COLUMNS = {
    "response_ids": pa.int32(),
    "weight_version": pa.int32(),
    "rollout_logprobs": pa.float32(),
    "advantages": pa.float32(),
}
NUM_ROWS = 64
CONSUMER = "consumer"


def make_batch(nbytes: int) -> pa.RecordBatch:
    """A group of NUM_ROWS samples with four columns of tokens, `nbytes` in all. All rows are of one length, so that no
    route has to pad."""
    num_tokens = nbytes // (NUM_ROWS * 4 * len(TOKEN_COLUMNS))
    offsets = pa.array(np.arange(NUM_ROWS + 1, dtype=np.int32) * num_tokens)
    values = np.arange(NUM_ROWS * num_tokens, dtype=np.int32)
    tokens = {
        name: pa.ListArray.from_arrays(offsets, pa.array(values.astype(kind.to_pandas_dtype())))
        for name, kind in TOKEN_COLUMNS.items()
    }
    ids = pa.array([f"r000000.e0.{row}" for row in range(NUM_ROWS)])
    return pa.RecordBatch.from_arrays([ids, *tokens.values()], names=["sample_id", *tokens])


def check(batch: pa.RecordBatch) -> None:
    """Looks at both ends of a batch that came."""
    values = batch.column("response_ids").values
    assert batch.num_rows == NUM_ROWS
    assert values[0].as_py() == 0
    assert values[len(values) - 1].as_py() == len(values) - 1


@dataclass
class Passed:
    """What went along a route in one round."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=lambda: [])  # from just before it was sent to when it was there


class Producer:
    """Has one batch of each size, and sends it as often as asked."""

    def __init__(self, sizes: Sequence[int]):
        self._batches = {size: make_batch(size) for size in sizes}
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._allowed = {(edge, size): threading.Semaphore(0) for edge in ("edge", "edge_journalled") for size in sizes}

    def ready(self) -> None:
        """Answers once the batches are made."""

    def put(self, size: int) -> tuple[float, float, list[Any]]:
        """When it began, how long it took, and the reference."""
        sent, begun = time.time(), time.perf_counter()
        ref = ray.put((sent, self._batches[size]))
        return sent, time.perf_counter() - begun, [ref]

    def enqueue(self, queue: Any, size: int, num: int) -> None:
        for _ in range(num):
            queue.put((time.time(), self._batches[size]), timeout=CALL_S)

    def enqueue_rows(self, queue: Any, size: int, num: int) -> None:
        rows = self._rows.setdefault(size, self._batches[size].to_pylist())
        for _ in range(num):
            queue.put((time.time(), rows), timeout=CALL_S)

    def allow(self, edge: str, size: int, num: int) -> None:
        """The stream to this edge may bring so many groups more."""
        self._allowed[edge, size].release(num)

    def produce(self, holder: str, known: tuple[int, frozenset[int]]) -> Iterator[tuple[Item, pa.RecordBatch]]:
        """As a stage's host does; `holder` says which edge, and which size."""
        edge, text = holder.split("/")
        size, order = int(text), known[0]
        allowed, batch = self._allowed[edge, size], self._batches[size]
        while True:
            allowed.acquire()
            yield (
                Item(
                    group_id=f"r{order:06d}.e0",
                    order=order,
                    version=0,
                    birth=f"{order:016x}",
                    num_rows=NUM_ROWS,
                    parts=(Part(edge="producer", nbytes=batch.nbytes),),
                    metrics={"rollout/response_tokens": (float(size), float(NUM_ROWS))},
                    trail=(Leg(stage="producer", begun=time.time(), seconds=0.0),),
                ),
                batch,
            )
            order += 1


class Consumer:
    """Takes batches by each route, looks at both ends of each, and lets it go."""

    def __init__(self, producer: Any):
        self._producer = producer

    def ready(self) -> None:
        """Answers once this process is there."""

    def limit(self, size: int, num: int) -> Passed:
        return self._handed_over(size, num, window=1)

    def limit_pipelined(self, size: int, num: int) -> Passed:
        return self._handed_over(size, num, window=WINDOW)

    def put_and_get(self, size: int, num: int) -> Passed:
        """Counts only the time within ray.put and ray.get, and nothing for the call between them."""
        passed = Passed()
        for _ in range(num):
            sent, put_s, (ref,) = ray.get(self._producer.put.remote(size), timeout=CALL_S)
            begun = time.perf_counter()
            _, batch = ray.get(ref, timeout=CALL_S)
            passed.seconds += put_s + time.perf_counter() - begun
            passed.latencies_s.append(time.time() - sent)
            check(batch)
            del batch, ref
        return passed

    def _handed_over(self, size: int, num: int, window: int) -> Passed:
        begun, passed = time.perf_counter(), Passed()
        calls = [self._producer.put.remote(size) for _ in range(min(window, num))]
        for index in range(num):
            _, _, (ref,) = ray.get(calls.pop(0), timeout=CALL_S)
            if index + window < num:
                calls.append(self._producer.put.remote(size))
            sent, batch = ray.get(ref, timeout=CALL_S)
            passed.latencies_s.append(time.time() - sent)
            check(batch)
            del batch, ref
        passed.seconds = time.perf_counter() - begun
        return passed

    def edge(self, edge: Any, name: str, size: int, num: int) -> Passed:
        """Leases AT_MOST groups at a time, as a rollout's host does, with the next call open already; acks in a call
        of its own, retires every few groups. `num` must be a multiple of AT_MOST."""
        begun, passed = time.perf_counter(), Passed()
        self._producer.allow.remote(name, size, num)

        def lease() -> Any:
            return edge.lease.remote(CONSUMER, AT_MOST, holder="consumer/0/0", fill=True)

        call, left = lease(), num
        trained: list[int] = []
        while left:
            got: Lease = ray.get(call, timeout=CALL_S)
            assert got.failure is None, got.failure
            left -= len(got.items)
            if left:
                call = lease()
            for item in got.items:
                batch = fetch(item, {})
                passed.latencies_s.append(time.time() - item.trail[0].begun)
                check(batch)
                del batch
            orders = [item.order for item in got.items]
            edge.ack.remote(CONSUMER, orders)
            trained += orders
            if len(trained) >= RETIRE_EVERY or not left:
                edge.retire.remote(trained)
                trained = []
        passed.seconds = time.perf_counter() - begun
        return passed

    def queue(self, queue: Any, size: int, num: int) -> Passed:
        return self._from_queue(queue, num, self._producer.enqueue.remote(queue, size, num), check)

    def pickled(self, queue: Any, size: int, num: int) -> Passed:
        return self._from_queue(queue, num, self._producer.enqueue_rows.remote(queue, size, num), lambda rows: None)

    def _from_queue(self, queue: Any, num: int, sending: Any, look: Callable[[Any], None]) -> Passed:
        begun, passed = time.perf_counter(), Passed()
        for _ in range(num):
            sent, batch = queue.get(timeout=CALL_S)
            passed.latencies_s.append(time.time() - sent)
            look(batch)
            del batch
        passed.seconds = time.perf_counter() - begun
        ray.get(sending, timeout=CALL_S)
        return passed
