"""The response has a form."""

from __future__ import annotations

import re

from rollstream.stages.reward.plugin import reward


@reward
def format_regex(response: str, pattern: str, full: bool = True) -> float:
    """1.0 if the whole response matches the regular expression, else 0.0; with `full` false a part is enough.

    `.` stops at a line end unless the pattern begins with (?s).

    >>> format_regex("<think>a</think>b", r"<think>.*</think>.+"), format_regex("x 7", "[0-9]", full=False)
    (1.0, 1.0)
    """
    match = re.fullmatch(pattern, response) if full else re.search(pattern, response)
    return float(match is not None)
