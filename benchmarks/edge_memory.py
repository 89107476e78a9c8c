"""What a long run keeps in memory: 10,000 groups through a graph whose update stage is slower than all before it.

    python benchmarks/edge_memory.py [--json] [--groups 10000]

    store     the raylet's count of bytes in the object store, asked every 50 ms; its peak against what the edges may
              hold: the sum of their bounds, and one group more for each
    spilled   bytes that went to disk because the store was full
    driver    resident memory of the process that calls `run`, around 90 % of the run against around 20 %

max_staleness is so large that the bounds of the edges rule, not admission: the run says how full the edges were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import memory_graph
import psutil
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

from rollstream import Bounds, run

STORE_BYTES = 512 << 20
#: Two steps' groups and a few more.
MAX_BYTES = 48 << 20
MAX_STALENESS = 20
SAMPLE_EVERY_S = 0.05
ANSWER_S = 10.0
#: A step's groups are read at once, and an edge's bound must let them all in.
UPDATE = memory_graph.SlowUpdate.Config(groups_per_step=50, sleep_s=0.4)


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes."""

    at_s: float
    store: int
    fallback: int  # of the store, on disk because it did not fit
    spilled: int  # ever
    driver: int  # resident


class Sampler(threading.Thread):
    """Asks the raylet of this machine, until `stop`."""

    def __init__(self) -> None:
        super().__init__(name="memory", daemon=True)
        self.samples: list[Sample] = []
        node = ray.nodes()[0]
        channel = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
        self._raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        messages: Any = node_manager_pb2  # made by protobuf as it is loaded
        self._question = messages.GetNodeStatsRequest(include_memory_info=False)
        self._driver = psutil.Process()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            store = self._raylet.GetNodeStats(self._question, timeout=ANSWER_S).store_stats
            self.samples.append(
                Sample(
                    at_s=time.monotonic(),
                    store=store.object_store_bytes_used,
                    fallback=store.object_store_bytes_fallback,
                    spilled=store.spilled_bytes_total,
                    driver=self._driver.memory_info().rss,
                )
            )

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=2 * ANSWER_S)


def measure(num_groups: int, folder: Path) -> dict[str, Any]:
    """Runs the graph to its end."""
    graph = memory_graph.graph(UPDATE, Bounds(max_bytes=MAX_BYTES), MAX_STALENESS)
    steps = num_groups // UPDATE.groups_per_step
    sampler = Sampler()
    begun = time.monotonic()
    first_s = 0.0
    staleness: list[int] = []
    sampler.start()
    try:
        for step in run(graph, steps=steps, out=folder / "out", export=False, save_every=steps, samples_every=steps):
            first_s = first_s or time.monotonic()
            staleness += step.staleness
    finally:
        sampler.stop()
    taken = [sample for sample in sampler.samples if sample.at_s >= first_s]
    return figures(taken) | {
        "groups": len(staleness),
        "seconds": round(time.monotonic() - begun, 1),
        "max_staleness_seen": max(staleness),
    }


def figures(samples: list[Sample]) -> dict[str, Any]:
    """Peaks, and the driver's growth."""
    each = memory_graph.group_bytes()
    early, late = around(samples, 0.2), around(samples, 0.9)
    return {
        "num_samples": len(samples),
        "store_peak_bytes": max(sample.store for sample in samples),
        "store_median_bytes": int(statistics.median(sample.store for sample in samples)),
        "allowed_bytes": sum(MAX_BYTES + nbytes for nbytes in each.values()),
        "group_bytes": each,
        "fallback_peak_bytes": max(sample.fallback for sample in samples),
        "spilled_bytes": samples[-1].spilled,
        "driver_early_bytes": early,
        "driver_late_bytes": late,
        "driver_growth": round(late / early, 4),
    }


def around(samples: list[Sample], share: float) -> int:
    """The driver's resident memory, the median of the tenth of the samples about this share of the run."""
    first, last = int(len(samples) * (share - 0.05)), int(len(samples) * (share + 0.05))
    return int(statistics.median(sample.driver for sample in samples[first:last]))


def bars(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        "store_peak/allowed": {
            "value": round(results["store_peak_bytes"] / results["allowed_bytes"], 3),
            "at_most": 1.0,
        },
        "spilled_bytes": {"value": results["spilled_bytes"] + results["fallback_peak_bytes"], "at_most": 0},
        "driver_growth": {"value": results["driver_growth"], "at_most": 1.05},
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="only the JSON object")
    arguments.add_argument("--groups", type=int, default=10_000)
    given = arguments.parse_args()
    with bench.private_cluster("memory", num_cpus=8, store_bytes=STORE_BYTES) as folder:
        results = measure(given.groups, folder)
    settings = {
        "groups": given.groups,
        "groups_per_step": UPDATE.groups_per_step,
        "update_sleep_s": UPDATE.sleep_s,
        "max_bytes": MAX_BYTES,
        "max_staleness": MAX_STALENESS,
        "object_store_bytes": STORE_BYTES,
        "sample_every_s": SAMPLE_EVERY_S,
    }
    report = bench.report(settings, ("ray", "pyarrow", "rollstream"), results, bars(results))
    if not given.json:
        for name, value in results.items():
            print(f"{name:22} {value}")
        for name, bar in report["bars"].items():
            print(f"{name}: {bar['value']}, at most {bar['at_most']}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
