"""Rollout: samples drawn from prompts by a generation engine.

engine      what an engine is: requests in, samples out, weights in
hf_engine   the engine inside transformers; with its sampler, its random numbers and its weight loading
vllm_engine vLLM; its settings, one sample's course, and what runs in vLLM's own processes (plugin, transfer)
rows        samples as Arrow columns
stage       `Rollout`, the stage
"""

from __future__ import annotations

from rollstream.stages.rollout.stage import Rollout

__all__ = ["Rollout"]
