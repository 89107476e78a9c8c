"""rollstream: reinforcement-learning post-training as a Ray-native pipeline of composable stages."""

from rollstream.graphs import Bounds, Graph, Step, Weights, run
from rollstream.placement import Bundle, Placement

__all__ = ["Bounds", "Bundle", "Graph", "Placement", "Step", "Weights", "run"]
