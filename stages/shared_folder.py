"""Folders in the machine's shared memory, for processes that cannot be handed what they need."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = "/dev/shm"


def make_folder(parent: str | None = None) -> Path:
    """A new folder in shared memory, or among temporary files where there is none. Folders that processes left which
    were killed are removed: each has the id of its process in its name."""
    chosen = parent or (SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else tempfile.gettempdir())
    for left in Path(chosen).glob("rollstream-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"rollstream-{os.getpid()}-", dir=chosen))
