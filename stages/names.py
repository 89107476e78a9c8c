"""Names that several stages know, and the end of an error message about one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Number formats that models are computed in.
DTYPES = ("float32", "bfloat16", "float16")


def known_names(wrong: str, names: Iterable[str]) -> str:
    """The valid names, the nearest to `wrong` first.

    >>> known_names("lenght", ["exact_match", "length"])
    "did you mean 'length'? Known: exact_match, length"
    """
    ordered = sorted(names)
    near = difflib.get_close_matches(wrong, ordered, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"Known: {', '.join(ordered) or 'none'}"
