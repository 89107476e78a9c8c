"""Waiting on Ray, always with a deadline and a name for what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from rollstream.stages.errors import ProcessDied, RollstreamError, StalledError

AGAIN_S = 0.2


def get(ref: Any, what: str, *, timeout_s: float) -> Any:
    """`ray.get`, or the error in our own terms: StalledError saying what did not come, ProcessDied for a dead process,
    or the error of ours that was raised at the other end."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except (GetTimeoutError, RayActorError, RayTaskError) as error:
        raise _ours(error, what, timeout_s) from None


def get_all(refs: Sequence[Any], what: str, *, timeout_s: float) -> list[Any]:
    """All of several; the first error of any comes at once, without waiting for the others."""
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if not done:
            raise StalledError(f"{what}: {len(pending)} of {len(refs)} gave no answer in {timeout_s:g} s")
        get(done, what, timeout_s=timeout_s)
    return get(list(refs), what, timeout_s=timeout_s)


def ask(call: Callable[[], Any], what: str, *, timeout_s: float) -> Any:
    """The answer to `call()`, asked again while the actor is being started again. Only for calls that may be made
    twice."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(call(), timeout=max(give_up - time.monotonic(), AGAIN_S))
        except (GetTimeoutError, RayActorError, RayTaskError) as error:
            if not isinstance(error, ActorUnavailableError) or time.monotonic() > give_up:
                raise _ours(error, what, timeout_s) from None
        time.sleep(AGAIN_S)


def _ours(error: GetTimeoutError | RayActorError | RayTaskError, what: str, timeout_s: float) -> Exception:
    if isinstance(error, GetTimeoutError):
        return StalledError(f"{what}: no answer in {timeout_s:g} s")
    if isinstance(error, RayActorError):
        return ProcessDied(what, "", f"its process died: {error}")
    return error.cause if isinstance(error.cause, RollstreamError) else error
