"""HOW stages are wired and run."""

from rollstream.graphs.graph import Bounds, EdgeSpec, Graph
from rollstream.graphs.runner import run
from rollstream.graphs.stats import Step
from rollstream.graphs.weights import Weights

__all__ = ["Bounds", "EdgeSpec", "Graph", "Step", "Weights", "run"]
