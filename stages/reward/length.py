"""A penalty for responses near or past a length."""

from __future__ import annotations

from rollstream.stages.reward.plugin import reward


@reward
def length(response_ids: list[int], max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment: 0 up to `max_tokens - buffer_tokens`, then down in a line to -1 at `max_tokens`, and -1
    past it. DAPO (arXiv 2503.14476), equation 13.

    >>> [length([0] * n, max_tokens=100, buffer_tokens=20) for n in (80, 90, 100, 120)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be from 1 to max_tokens ({max_tokens}), got {buffer_tokens}")
    over = len(response_ids) - (max_tokens - buffer_tokens)
    return -min(max(over, 0) / buffer_tokens, 1.0) + 0.0
