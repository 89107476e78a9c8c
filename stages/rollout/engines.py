"""Engines by name. An engine is loaded only where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollstream.stages.rollout.engine import Engine, Sampling

if TYPE_CHECKING:
    from rollstream.stages.rollout.stage import Rollout

#: Names that `make_engine` knows.
ENGINES: tuple[str, ...] = ("transformers", "vllm")


def make_engine(config: Rollout.Config, sampling: Sampling, *, stage: str) -> Engine:
    """The engine that the settings ask for; its errors name `stage`."""
    if config.engine == "transformers":
        from rollstream.stages.rollout.hf_engine import TransformersEngine

        return TransformersEngine(config.model, dtype=config.dtype, stage=stage)
    assert config.engine == "vllm", config.engine
    from rollstream.stages.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        config.model,
        dtype=config.dtype,
        stage=stage,
        sampling=sampling,
        updates=config.weight_updates or "resume",
        timeout_s=config.engine_timeout_s,
        check_weights=config.check_weights,
        args=config.engine_args,
    )
