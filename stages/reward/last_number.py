"""The last number of the response is the target."""

from __future__ import annotations

import re
from fractions import Fraction

from rollstream.stages.errors import DataError
from rollstream.stages.reward.plugin import reward

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−])?"  # a sign only where no word or number stands before it: "3-5" ends with 5
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"  # 1,000.5 or 1000.5 or .5
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?(?:/[0-9]+)?"
)
#: Longer numbers are read as no number: no target is so long, and the time to read one grows with its square.
MAX_CHARACTERS = 1000


@reward
def last_number(response: str, target: object) -> float:
    """1.0 if the last number in the response equals the last one in the target exactly, else 0.0.

    Reads signs, decimals, thousands, exponents and fractions: -3, 0.5, .5, 1,000, 2e3, 1/2. Raises DataError if the
    target has no number.

    >>> last_number("so 3 and 4 make 1,000.", "#### 1000"), last_number("a half: 1/2", 0.5), last_number("none", 3)
    (1.0, 1.0, 0.0)
    """
    wanted = None if isinstance(target, bool) else find_last_number(str(target))
    if wanted is None:
        raise DataError(f"target {target!r} holds no number")
    return float(find_last_number(response) == wanted)


def find_last_number(text: str) -> Fraction | None:
    """The exact value of the last number in the text."""
    found = NUMBER.findall(text)
    if not found or len(found[-1]) > MAX_CHARACTERS:
        return None
    top, _, bottom = found[-1].replace(",", "").replace("−", "-").partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top) / Fraction(bottom or 1)
