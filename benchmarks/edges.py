"""How fast batches get from one process to another through an edge, against other ways to bring them there, in one run.

    python benchmarks/edges.py [--json] [--rounds 7] [--peers FOLDER]

    limit            ray.put in the producer, its reference handed over, ray.get in the consumer: one after another
    limit_pipelined  the same with 4 hand-overs open at once, for information
    put_and_get      the time within ray.put and ray.get alone, for information
    edge             an EdgeActor with leases, acks and bounds, its journal off
    edge_journalled  the same with its journal on
    queue            ray.util.queue.Queue of record batches
    pickled          the same of lists of dicts, one dict a row
    transfer_queue, data_proto    other projects' ways (edge_peers.py says how to install them)

Every round goes through all sizes and, in each, through all routes, forwards and backwards in turn. Figures are medians
over the rounds; ratios are taken within a round, and their median is told. The first rounds are not counted: shared
memory and the journal's files are slow while the kernel still has to find their pages, and a run is long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import bench
import edge_routes
import psutil
import ray
from edge_peers import PeerConsumer, PeerProducer
from edge_routes import CONSUMER, Consumer, Passed, Producer
from ray.exceptions import RayError
from ray.util.queue import Queue

from rollstream.graphs import actors
from rollstream.graphs.edge_actor import EdgeActor, EdgeSettings

KB, MB = 1 << 10, 1 << 20
SIZES = {"64 KB": 64 * KB, "1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB}
#: Batches of each size in a round: of the quick routes, and of those that take seconds for a big one.
NUM_BATCHES = {64 * KB: 100, MB: 48, 16 * MB: 24, 64 * MB: 12}
NUM_SLOW = {64 * KB: 20, MB: 8, 16 * MB: 4, 64 * MB: 2}
SLOW = ("pickled", "transfer_queue", "data_proto")
STORE_BYTES = 4 << 30
#: An edge may hold so many batches, and no less than 8 MB.
MAX_BATCHES = 8
WARMUP_ROUNDS = 3
START_S = 120.0
ROUTE_S = 300.0
Route = Callable[[int, int], Any]  # (size, number of batches) -> the call of a consumer's method


@dataclass
class Samples:
    """One route with one size, a figure for each round."""

    mb_per_s: list[float] = field(default_factory=lambda: [])
    p50_ms: list[float] = field(default_factory=lambda: [])
    cpu_ms: list[float] = field(default_factory=lambda: [])

    def add(self, passed: Passed, num: int, size: int, cpu_s: float) -> None:
        self.mb_per_s.append(num * size / passed.seconds / 1e6)
        self.p50_ms.append(1e3 * statistics.median(passed.latencies_s))
        self.cpu_ms.append(1e3 * cpu_s / num)

    def over(self, other: Samples) -> float:
        """How many times as fast as the other: the median of what was so within a round."""
        pairs = zip(self.mb_per_s, other.mb_per_s, strict=True)
        return round(statistics.median(own / theirs for own, theirs in pairs), 3)

    def told(self) -> dict[str, float]:
        return {
            "mb_per_s": round(statistics.median(self.mb_per_s), 1),
            "min_mb_per_s": round(min(self.mb_per_s), 1),
            "max_mb_per_s": round(max(self.mb_per_s), 1),
            "p50_latency_ms": round(statistics.median(self.p50_ms), 2),
            "cpu_ms_per_batch": round(statistics.median(self.cpu_ms), 2),
        }


def start_edge(producer: Any, name: str, size: int, folder: Path) -> Any:
    """An edge that pulls the producer, made as a run makes it."""
    settings = EdgeSettings(
        name=f"producer -> {CONSUMER}",
        producer="producer",
        consumers=(CONSUMER,),
        num_producers=1,
        max_groups=256,
        max_bytes=max(MAX_BATCHES * size, 8 * MB),
        lease_s=900.0,
        needed=1,
        max_deaths=2,
        folder=folder / f"{name}-{size}",
        journal=name == "edge_journalled",
    )
    edge = actors.start(EdgeActor, settings, comes_back=True, max_concurrency=1000)
    ray.get(edge.begin.remote({}, (0, ()), 0), timeout=START_S)
    ray.get(edge.open.remote(), timeout=START_S)
    edge.pull.remote(0, producer, f"{name}/{size}", None)
    return edge


def own_routes(folder: Path) -> dict[str, Route]:
    """All routes that need only Ray and ours."""
    producer = actors.start(Producer, list(SIZES.values()), max_concurrency=16)
    consumer = actors.start(Consumer, producer)
    ray.get([producer.ready.remote(), consumer.ready.remote()], timeout=START_S)
    queue = Queue(maxsize=MAX_BATCHES)

    def by_edge(name: str) -> Route:
        edges = {size: start_edge(producer, name, size, folder) for size in SIZES.values()}
        return lambda size, num: consumer.edge.remote(edges[size], name, size, num)

    return {
        "limit": consumer.limit.remote,
        "edge": by_edge("edge"),
        "limit_pipelined": consumer.limit_pipelined.remote,
        "edge_journalled": by_edge("edge_journalled"),
        "put_and_get": consumer.put_and_get.remote,
        "queue": partial(consumer.queue.remote, queue),
        "pickled": partial(consumer.pickled.remote, queue),
    }


def peer_routes(folder: Path | None) -> tuple[dict[str, Route], dict[str, str], dict[str, str]]:
    """The other projects' routes, their versions, and why one is skipped."""
    if folder is None:
        return {}, {}, dict.fromkeys(("transfer_queue", "data_proto"), "not installed: no --peers FOLDER was given")
    environment = {"env_vars": {"PYTHONPATH": str(folder.absolute())}}
    producer = actors.start(PeerProducer, list(SIZES.values()), runtime_env=environment)
    consumer = actors.start(PeerConsumer, producer, runtime_env=environment)
    routes: dict[str, Route] = {}
    versions: dict[str, str] = {}
    skipped: dict[str, str] = {}
    try:
        versions["TransferQueue"] = ray.get(producer.start_queue.remote(), timeout=START_S)
        ray.get(consumer.start_queue.remote(), timeout=START_S)
        routes["transfer_queue"] = consumer.transfer_queue.remote
    except RayError as error:
        skipped["transfer_queue"] = str(error).strip().splitlines()[-1]
    try:
        versions["verl"] = ray.get(producer.start_proto.remote(), timeout=START_S)
        routes["data_proto"] = consumer.data_proto.remote
    except RayError as error:
        skipped["data_proto"] = str(error).strip().splitlines()[-1]
    return routes, versions, skipped


def cluster_cpu_s() -> float:
    """CPU seconds that the processes of this cluster have used."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(routes: Mapping[str, Route], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """What each route does with each size."""
    found = {(label, route): Samples() for label in SIZES for route in routes}
    for number in range(WARMUP_ROUNDS + rounds):
        print(f"round {number + 1} of {WARMUP_ROUNDS + rounds}", file=sys.stderr)
        for label, size in SIZES.items():
            for route in sorted(routes, key=list(routes).index, reverse=bool(number % 2)):
                num = (NUM_SLOW if route in SLOW else NUM_BATCHES)[size]
                before = cluster_cpu_s()
                passed: Passed = ray.get(routes[route](size, num), timeout=ROUTE_S)
                if number >= WARMUP_ROUNDS:
                    found[label, route].add(passed, num, size, cluster_cpu_s() - before)
    return {
        label: {
            route: {
                **found[label, route].told(),
                "to_limit": found[label, route].over(found[label, "limit"]),
                "to_queue": found[label, route].over(found[label, "queue"]),
            }
            for route in routes
        }
        for label in SIZES
    }


def bars(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        "edge/limit at 16 MB": {"value": results["16 MB"]["edge"]["to_limit"], "at_least": 0.7},
        "edge/limit at 64 MB": {"value": results["64 MB"]["edge"]["to_limit"], "at_least": 0.8},
        "edge/queue at 16 MB": {"value": results["16 MB"]["edge"]["to_queue"], "at_least": 2.0},
        "edge/queue at 64 MB": {"value": results["64 MB"]["edge"]["to_queue"], "at_least": 2.0},
        "edge_journalled/limit at 64 MB": {
            "value": results["64 MB"]["edge_journalled"]["to_limit"],
            "at_least": 0.4,
        },
    }


def show(report: Mapping[str, Any]) -> None:
    print(f"{'':24}MB/s  to limit  p50 ms  CPU ms a batch")
    for label in SIZES:
        for route, told in report["results"][label].items():
            figures = f"{told['mb_per_s']:10.0f}{told['to_limit']:10.2f}{told['p50_latency_ms']:8.1f}"
            print(f"{label:7}{route:17}{figures}{told['cpu_ms_per_batch']:10.1f}")
    for name, bar in report["bars"].items():
        print(f"{name}: {bar['value']:.2f}, at least {bar['at_least']}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="only the JSON object")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--peers", type=Path, help="folder that TransferQueue and verl are installed in")
    given = arguments.parse_args()
    load_before = os.getloadavg()[0]
    with bench.private_cluster("edges", num_cpus=16, store_bytes=STORE_BYTES) as folder:
        peers, versions, skipped = peer_routes(given.peers)
        results = measure(own_routes(folder) | peers, given.rounds)
    settings = {
        "rounds": given.rounds,
        "warmup_rounds": WARMUP_ROUNDS,
        "warm": "counted rounds find shared memory and the journal's segments already used: so is a long run",
        "batches_a_round": {label: NUM_BATCHES[size] for label, size in SIZES.items()},
        "batches_a_round_of_slow_routes": {label: NUM_SLOW[size] for label, size in SIZES.items()},
        "slow_routes": SLOW,
        "rows": edge_routes.NUM_ROWS,
        "columns": {name: str(kind) for name, kind in edge_routes.TOKEN_COLUMNS.items()},
        "lease": {"at_most": edge_routes.AT_MOST, "fill": True},
        "retire_every": edge_routes.RETIRE_EVERY,
        "window": edge_routes.WINDOW,
        "edge_max_batches": MAX_BATCHES,
        "object_store_bytes": STORE_BYTES,
    }
    told = {**results, **{route: {"skipped": why} for route, why in skipped.items()}}
    report = bench.report(settings, ("ray", "pyarrow", "rollstream"), told, bars(results))
    report["versions"] |= versions
    report["machine"] |= {"load_before": load_before, "load_after": os.getloadavg()[0]}
    if not given.json:
        show(report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
