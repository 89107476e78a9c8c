"""HOW stages are wired and run. Names are loaded when they are used: a stage's process needs only its host."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.graphs.evaluation import Evaluation
    from rollstream.graphs.graph import Bounds, EdgeSpec, Graph
    from rollstream.graphs.runner import run
    from rollstream.graphs.stats import Step
    from rollstream.graphs.weights import Weights

_HOME = {
    "Bounds": "graph",
    "EdgeSpec": "graph",
    "Evaluation": "evaluation",
    "Graph": "graph",
    "Step": "stats",
    "Weights": "weights",
    "run": "runner",
}

__all__ = ["Bounds", "EdgeSpec", "Evaluation", "Graph", "Step", "Weights", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollstream.graphs' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"rollstream.graphs.{_HOME[name]}"), name)
