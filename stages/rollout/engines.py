"""Engines by name. An engine is loaded only where it is used."""

from __future__ import annotations

from rollstream.stages.rollout.engine import Engine

#: Names that `make_engine` knows.
ENGINES: tuple[str, ...] = ("transformers",)


def make_engine(name: str, model: str, *, dtype: str, stage: str) -> Engine:
    """The engine called `name` with the model of folder `model`; its errors name `stage`."""
    assert name in ENGINES, name
    from rollstream.stages.rollout.hf_engine import TransformersEngine

    return TransformersEngine(model, dtype=dtype, stage=stage)
