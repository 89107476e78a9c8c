"""Whether prompts and responses fit the model together."""

from __future__ import annotations

from typing import Any

from rollstream.stages.base import Stage


def length_faults(source: Stage[Any, Any] | None, rollout: Stage[Any, Any] | None) -> list[str]:
    """A sentence where the source's longest prompt and the longest response outgrow the model, for stages that know."""
    if rollout is None or "max_tokens" not in rollout.settings() or not hasattr(source, "longest_prompt"):
        return []
    longest: int = getattr(source, "longest_prompt")()  # noqa: B009 - only some sources know it
    limit: int | None = getattr(source, "max_model_tokens")()  # noqa: B009
    wanted = longest + rollout.settings()["max_tokens"]
    if limit is None or wanted <= limit:
        return []
    return [
        f"the longest prompt has {longest} tokens and {rollout.name}.max_tokens is "
        f"{rollout.settings()['max_tokens']}: {wanted} in all, the model takes {limit}. "
        f"Lower max_tokens, or set max_prompt_tokens with too_long='skip'"
    ]
