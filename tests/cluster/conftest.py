"""One private Ray cluster for all tests of this folder, and the toy stages, which travel to it by value."""

import sys
from pathlib import Path

import pytest
import ray
from ray import cloudpickle

sys.path.insert(0, str(Path(__file__).parent))
import toys

cloudpickle.register_pickle_by_value(toys)


@pytest.fixture(scope="session", autouse=True)
def cluster(tmp_path_factory):
    """Eight logical CPUs; the dashboard serves the table of actors."""
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=True,
        log_to_driver=False,
        _temp_dir=str(tmp_path_factory.mktemp("r")),
    )
    yield
    ray.shutdown()
