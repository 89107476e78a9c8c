"""Settings as records show them: plain values without secrets.

A secret is known by its name (`WANDB_API_KEY`, `hf_token`, `db.password`) or by its place in a URL
(`https://user:password@host`). Numbers under a name with "key" or "token" are counts (`max_tokens`) and stay.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

REDACTED = "[redacted]"

# In lower case the word must end there ("tokenizer" is none); in upper case any name that holds it counts.
_COUNTABLE = r"(?:[Kk]ey|[Tt]oken)s?(?![a-z])|KEY|TOKEN"
_NEVER = r"(?:[Ss]ecret|[Pp]assword|[Pp]asswd|[Cc]redential)s?(?![a-z])|SECRET|PASSWORD|PASSWD|CREDENTIAL"
_COUNTABLE_NAME, _NEVER_NAME = re.compile(_COUNTABLE), re.compile(_NEVER)
_URL_LOGIN = re.compile(r"(\b[a-zA-Z][\w+.-]*://)[^/\s@\"']+@")
_BEARER = re.compile(r"(\bBearer\s+)[\w.~+/=-]+")
_OPTION = re.compile(rf"(--[\w-]*(?:{_COUNTABLE}|{_NEVER})[\w-]*)(\s+)([^\s-]\S*)")  # --hf-token abc
_ASSIGNED = re.compile(  # WANDB_API_KEY=abc   ?key=abc   "token": "abc"   "--hf-token", "abc"
    rf"""([\w?&.-]*(?:{_COUNTABLE}|{_NEVER})[\w-]*)(["']?\s*:\s*["']|=["']?|["']\s*,\s*["'])([^\s&,;"']+)"""
)


def redact_text(text: str) -> str:
    """The text without logins in URLs and without values assigned to secret names.

    >>> redact_text("MY_TOKEN=abc max_tokens=512 postgresql://me:pw@db/runs")
    'MY_TOKEN=[redacted] max_tokens=512 postgresql://[redacted]@db/runs'
    """
    text = _BEARER.sub(rf"\1{REDACTED}", _URL_LOGIN.sub(rf"\1{REDACTED}@", text))
    return _ASSIGNED.sub(_hide_value, _OPTION.sub(_hide_value, text))


def _hide_value(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    is_count = value.isdigit() and not _NEVER_NAME.search(name)
    is_sort_key = name == "key"  # sorted(rows, key=len)
    return match.group() if is_count or is_sort_key else f"{name}{sign}{REDACTED}"


def plain(value: object, name: str = "") -> Any:
    """The value as JSON holds it, secrets redacted: dataclasses and mappings as dicts, functions by their names.

    >>> plain({"lr": 1e-6, "env": {"HF_TOKEN": "abc"}})
    {'lr': 1e-06, 'env': {'HF_TOKEN': '[redacted]'}}
    """
    if value is None or isinstance(value, bool):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{name} {k}") for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(v, name) for v in cast("Iterable[object]", value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(v, name) for v in cast("Iterable[object]", value)), key=str)
    if _NEVER_NAME.search(name):
        return REDACTED
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):  # JSON has no word for the others
        return value
    return REDACTED if _COUNTABLE_NAME.search(name) else redact_text(_text(value))


def _text(value: object) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)


def flatten(settings: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, str]]:
    """Plain settings as ("rollout.temperature", "0.7"); lists as JSON text, an empty mapping as "{}"."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(cast("Mapping[str, Any]", value), f"{head}{name}.")
        else:
            yield f"{head}{name}", json.dumps(value) if isinstance(value, list | dict) else str(value)
