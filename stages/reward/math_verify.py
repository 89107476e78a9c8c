"""The response's mathematical answer equals the target's, by the math-verify package."""

from __future__ import annotations

import json
import re
from typing import Any

from math_verify import parse, verify

from rollstream.stages.errors import DataError
from rollstream.stages.reward.plugin import reward

#: How a target that is LaTeX already begins its mathematics; others are taken whole as one expression.
MARKED = re.compile(r"\\boxed|\$|\\\(|\\\[")
#: A word of prose, not a command or a product of a few letters.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")


@reward
def math_verify(response: str, target: object, step_timeout_s: int = 3) -> float:
    """1.0 if the response's answer is equal to the target, else 0.0.

    The answer is the last \\boxed{} of the response, or without one what math-verify extracts. Each of the three steps
    (read target, read answer, compare) may take `step_timeout_s`; an answer that takes longer is not equal.

        target              response                          reward
        3                   3    $3$    \\boxed{3}    x=3       1.0
        3                   \\boxed{2} then \\boxed{3}           1.0
        3                   \\boxed{3} then \\boxed{2}           0.0
        1/2   \\frac{1}{2}   0.5   \\boxed{\\frac{2}{4}}         1.0
        x=2                 2                                 1.0
        E   \\text{E}        \\boxed{\\text{E}}                  1.0
        2^{10}              1024                              1.0
        3                   no number, or nothing             0.0
        "" or prose         anything                          DataError

    Raises DataError if the target is not mathematics: nobody's answer could be right.
    """
    gold = parse_target(target, step_timeout_s)
    start = response.rfind("\\boxed")
    answer: Any = parse(response[max(start, 0) :], parsing_timeout=step_timeout_s)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=step_timeout_s))


def parse_target(target: object, step_timeout_s: int) -> Any:
    """The target as math-verify sees it. Raises DataError if that is nothing."""
    text = (target if isinstance(target, str) else json.dumps(target)).strip()
    is_marked = MARKED.search(text) is not None
    is_prose = not is_marked and not re.search("[0-9]", text) and WORD.search(re.sub(r"\\[A-Za-z]+", "", text))
    gold: Any = (
        []
        if not text or is_prose
        else parse(text if is_marked else f"\\boxed{{{text}}}", parsing_timeout=step_timeout_s)
    )
    if not gold:
        raise DataError(f"target {target!r} is no mathematics that math-verify can read; exact_match compares text")
    return gold
