"""A value of a data file -> JSON text from which the same value comes back.

str, int of any size, bool, null, finite float, list, object      as they are
date, time, timestamp                                             ISO 8601 text
Decimal, UUID                                                     its text, digit for digit
bytes, NaN, infinity, duration, anything else                     refused: JSON has no form for it
"""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from typing import Any


def to_json(value: object) -> str:
    """JSON text of `value`, ASCII only, so that any text survives.

    Raises TypeError or ValueError where JSON has no form for it.

    >>> to_json({"n": 2**64, "when": datetime.date(2024, 1, 2)})
    '{"n": 18446744073709551616, "when": "2024-01-02"}'
    """
    return json.dumps(value, default=_as_text, allow_nan=False)


def _as_text(value: object) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError(f"JSON has no form for {type(value).__name__}; make the column text or numbers, or leave it out")


def without_null_fields(value: Any) -> Any:
    """A copy without the object fields that are null: a columnar file gives each row the fields of all rows.

    >>> without_null_fields([{"role": "user", "content": "hi", "tool_calls": None}])
    [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(value, dict):
        return {k: without_null_fields(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_null_fields(v) for v in value]
    return value
