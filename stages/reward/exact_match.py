"""The response is the target."""

from __future__ import annotations

import json

from rollstream.stages.reward.plugin import reward


@reward
def exact_match(response: str, target: object, strip: bool = True) -> float:
    """1.0 if the response equals the target, else 0.0; space around both is left out unless `strip` is false.

    A target that is not text is compared as its JSON text.

    >>> exact_match(" 72\\n", 72), exact_match("72.", "72")
    (1.0, 0.0)
    """
    wanted = target if isinstance(target, str) else json.dumps(target)
    if strip:
        response, wanted = response.strip(), wanted.strip()
    return float(response == wanted)
