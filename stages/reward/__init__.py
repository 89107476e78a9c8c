"""Scores samples with a plain function of the user's.

    @reward
    def short(response, target) -> float:
        return float(response.strip() == target)

    plugin.py      the decorator, and the functions it knows
    resolve.py     a name, "pkg.mod:fn" or a function -> the function
    signature.py   which arguments it takes
    ship.py        function -> bytes that another process can load
    channel.py     messages over pipes, with deadlines
    child.py       the process that runs it, seen from the stage
    worker.py      that process, seen from inside
    outcome.py     what came of one sample
    stage.py       Reward

The functions that come with rollstream have a file each: exact_match, last_number, math_verify, format_regex, length.
"""

from __future__ import annotations

from rollstream.stages.reward.plugin import reward
from rollstream.stages.reward.stage import Reward

__all__ = ["Reward", "reward"]
