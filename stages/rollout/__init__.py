"""Rollout: samples drawn from prompts by a generation engine.

engine      what an engine is: requests in, samples out, weights in
hf_engine   the engine inside transformers; with its sampler, its random numbers and its weight loading
vllm_engine vLLM; its settings, one sample's course, and what runs in vLLM's own processes (plugin, transfer)
episodes    a rollout function of the user's: a coroutine a sample between stage and engine; with what it is given
            (trajectory, turn_engine), how it is found and shipped (function), and one sample's run (episode)
rows        samples as Arrow columns
stage       `Rollout`, the stage
"""

from __future__ import annotations

from rollstream.stages.rollout.stage import Rollout
from rollstream.stages.rollout.trajectory import Prompt, Trajectory
from rollstream.stages.rollout.turn_engine import TurnEngine

__all__ = ["Prompt", "Rollout", "Trajectory", "TurnEngine"]
