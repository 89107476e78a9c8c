"""Ray's object store and the disk that it spills to are full: the run says so and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TOYS = Path(__file__).parents[1] / "cluster"
#: The smallest store that Ray takes, and a disk that Ray takes for full; a group of 120 MB.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import ray, toys
from pathlib import Path
from ray import cloudpickle
from rollstream import run

cloudpickle.register_pickle_by_value(toys)
ray.init(
    address="local", num_cpus=4, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False,
    _temp_dir=sys.argv[2], _system_config={"local_fs_capacity_threshold": 0.001},
)
for step in run(toys.toy_graph(Path("diary"), echo={"response_chars": 60_000_000}), steps=1, out="out"):
    print(step)
"""


def test_a_full_object_store_ends_the_run_with_its_name(script, python, tmp_path, tmp_path_factory):
    file = tmp_path / "full.py"
    file.write_text(SCRIPT)
    process = script(python, file, TOYS, tmp_path_factory.mktemp("r"))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "stage 'echo' failed" in errors
    assert "OutOfDiskError" in errors
    assert "lower Bounds.max_bytes or the size of a group" in errors
