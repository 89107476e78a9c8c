"""Metric names as every tracker takes them, reversibly: two names never become one.

Trackers refuse names with other than letters, digits, `_ - . /` and blanks, names that read as another path (`/a`,
`a//b`, `a/../b`), and long names. What they refuse is written `_xHEX_`, HEX being the character's code point; an
underscore before an `x` is written so as well, since it would read as such an escape.

>>> encode("timing(s)/gen")
'timing_x28_s_x29_/gen'
>>> decode("timing_x28_s_x29_/gen")
'timing(s)/gen'
"""

from __future__ import annotations

import hashlib
import re

#: Longest name that MLflow takes, in characters.
MAX_NAME_CHARS = 250

_REFUSED = re.compile(
    r"""
      [^A-Za-z0-9_\-./\ ]              # refused by some store
    | _(?=x)                           # would read as the start of an escape
    | (?:\A|(?<=/))/ | /\Z             # an empty part of a path
    | (?:\A|(?<=/))\.{1,2}(?=/|\Z)     # a part that walks the path
    | \A\ | \ \Z                       # blanks at an end are dropped by some databases
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"_x([0-9A-F]*)_")
_EMPTY = "_x_"


def encode(name: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """The name as trackers take it. A name that stays too long keeps its head and ends in `_xh<16 hex digits>_`, a hash
    of the whole: unique, but only the full name, kept elsewhere, tells what was cut."""
    text = _REFUSED.sub(lambda m: "".join(f"_x{ord(c):X}_" for c in m.group()), name) or _EMPTY
    if len(text) <= max_chars:
        return text
    tail = f"_xh{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}_"
    return text[: max_chars - len(tail)] + tail


def decode(encoded: str) -> str:
    """The name that `encode` was given, unless it was cut."""
    return _ESCAPE.sub(lambda m: chr(int(m.group(1), 16)) if m.group(1) else "", encoded)
