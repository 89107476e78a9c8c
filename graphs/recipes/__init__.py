"""Graphs that people ask for by name: plain functions from a config to a Graph."""

from rollstream.graphs.recipes.grpo import GRPO, grpo

__all__ = ["GRPO", "grpo"]
