"""Whose turn it is on the GPUs that the rollout engines and the update stage take by turns.

    the engines'    from the wait for a step's groups on; one that died is loaded again in this turn only
    the trainer's   from the engines' rest on, through the update, the new weights and a copy for the checkpoint

An engine that is loaded measures how much memory is free, and the trainer needs all that the engines have given back:
neither may begin within the other.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from rollstream.stages.errors import StalledError

#: Between two looks whether the run is over.
POLL_S = 0.5


class Turns:
    """Of one attempt. The run's loop gives the turns, other threads load engines."""

    def __init__(self) -> None:
        self._gpus = threading.Lock()
        self._is_over = threading.Event()
        self.trainer = False

    def to_trainer(self, *, timeout_s: float) -> None:
        """Waits for engines that are being loaded; from then on none is. Raises StalledError."""
        if not self.trainer:
            if not self._gpus.acquire(timeout=timeout_s):
                raise StalledError(f"an engine was loaded for {timeout_s:g} s, and the update stage waits for its GPUs")
            self.trainer = True

    def to_engines(self) -> None:
        if self.trainer:
            self.trainer = False
            self._gpus.release()

    @contextmanager
    def loading(self) -> Generator[None]:
        """Waits for the engines' turn, and has it last. One engine at a time. Raises StalledError where the run ends
        before."""
        while not self._gpus.acquire(timeout=POLL_S):
            if self._is_over.is_set():
                raise StalledError("the run is over, and an engine that died was not loaded again")
        try:
            yield
        finally:
            self._gpus.release()

    def end(self) -> None:
        """Nobody waits for a turn any more."""
        self._is_over.set()
