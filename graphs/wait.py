"""Waiting on Ray, always with a deadline and a name for what is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rollstream.stages.errors import RollstreamError, StageError, StalledError


def get(ref: Any, what: str, *, timeout_s: float) -> Any:
    """`ray.get`, or the error in our own terms: StalledError saying what did not come, StageError for a dead process,
    or the error of ours that was raised at the other end."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise StalledError(f"{what}: no answer in {timeout_s:g} s") from None
    except RayActorError as error:
        raise StageError(what, "", f"its process died: {error}") from None
    except RayTaskError as error:
        if isinstance(error.cause, RollstreamError):
            raise error.cause from None
        raise


def get_all(refs: Sequence[Any], what: str, *, timeout_s: float) -> list[Any]:
    """All of several; the first error of any comes at once, without waiting for the others."""
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if not done:
            raise StalledError(f"{what}: {len(pending)} of {len(refs)} gave no answer in {timeout_s:g} s")
        get(done, what, timeout_s=timeout_s)
    return get(list(refs), what, timeout_s=timeout_s)
