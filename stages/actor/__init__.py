"""The stage that trains the policy."""

from __future__ import annotations

from rollstream.stages.actor.stage import ActorUpdate

__all__ = ["ActorUpdate"]
