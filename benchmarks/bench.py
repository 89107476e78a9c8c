"""What the benchmarks share: a cluster of their own, and the form of a report."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any


@contextmanager
def private_cluster(name: str, *, num_cpus: int, store_bytes: int) -> Generator[Path]:
    """A cluster of logical CPUs with an object store of this size, and a folder; both are gone at the end."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix=name))
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store_bytes,
        _temp_dir=str(folder / "r"),
    )
    try:
        yield folder
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def report(
    settings: Mapping[str, Any], packages: Iterable[str], results: Mapping[str, Any], bars: Mapping[str, Any]
) -> dict[str, Any]:
    """One run as the JSON object that a benchmark prints last."""
    return {
        "settings": dict(settings),
        "versions": {name: version(name) for name in packages},
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "results": dict(results),
        "bars": dict(bars),
    }
