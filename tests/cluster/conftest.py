"""The toy stages, which travel to the cluster by value."""

import sys
from pathlib import Path

from ray import cloudpickle

sys.path.insert(0, str(Path(__file__).parent))
import toys

cloudpickle.register_pickle_by_value(toys)
