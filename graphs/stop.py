"""Ctrl-C and SIGTERM as a flag that the run's loop looks at; the second signal ends the process as usual."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


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
