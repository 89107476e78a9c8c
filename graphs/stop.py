"""Ctrl-C and SIGTERM as a flag that the run's loop looks at; the second signal ends the process as usual."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

#: A step in flight gets so long to end after a stop signal; then the run ends without it.
GRACE_S = 20.0
#: What Ray gives a stopped job until it kills it, unless RAY_JOB_STOP_WAIT_TIME_S says otherwise.
JOB_GRACE_S = 3.0
#: Share of a job's grace that a step in flight may take; the rest is for the checkpoint.
STEP_SHARE = 0.4


def step_grace_s(environment: Mapping[str, str]) -> float:
    """Seconds that a step in flight may go on after a stop signal.

    >>> step_grace_s({}), step_grace_s({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "10"})
    (20.0, 4.0)
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in environment:
        return GRACE_S
    return min(STEP_SHARE * float(environment.get("RAY_JOB_STOP_WAIT_TIME_S", JOB_GRACE_S)), GRACE_S)


class StopFlag:
    """Catches SIGINT and SIGTERM while entered. Enter it after `ray.init`, which installs a handler of its own."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.__exit__(None, None, None)
            signal.raise_signal(number)
        self.signal = number

    def exit(self) -> None:
        """Ends as a process does that such a signal ends: KeyboardInterrupt, or exit code 128 + number."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)
