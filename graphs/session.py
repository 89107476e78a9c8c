"""The connection to Ray: the cluster that RAY_ADDRESS names (a Ray job has it set), or a private one right here."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager

import ray


@contextmanager
def connected() -> Generator[None]:
    """Ray is up while entered. One that was up before is left up."""
    if ray.is_initialized():
        yield
        return
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "local"),
        include_dashboard=None if "RAY_ADDRESS" in os.environ else False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
