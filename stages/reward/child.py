"""The worker process, seen from the stage: started when needed, killed when it overruns, started again."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from rollstream.stages.errors import PluginError
from rollstream.stages.reward.channel import Channel
from rollstream.stages.reward.outcome import Began, Done, Failure, Job, Outcome, TimedOut

#: Start of the interpreter and import of the function's modules; counts against no sample.
START_LIMIT_S = 120.0
#: Between two samples, and for taking in a job, the worker does nothing of the function's.
BETWEEN_LIMIT_S = 30.0


class Process:
    """One worker process, leader of its own process group."""

    def __init__(self) -> None:
        life_read, life_write = os.pipe()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollstream.stages.reward.worker", str(life_read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(life_read,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(life_read)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.channel = Channel(self.popen.stdout.fileno(), self.popen.stdin.fileno())
        self._end = weakref.finalize(self, _end, self.popen, life_write)

    def end(self) -> int:
        """Kills the process with all in its group and waits for it; its exit status, negative for a signal."""
        self._end()
        return self.popen.returncode


def _end(popen: subprocess.Popen[bytes], life_write: int) -> None:
    # The group first: until its leader is waited for, no other process can get the number.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait(timeout=BETWEEN_LIMIT_S)
    os.close(life_write)
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            pipe.close()


class Child:
    """Scores samples with a shipped function, within a time limit that holds whatever the function does."""

    def __init__(self, payload: bytes, *, stage: str, timeout_s: float):
        self.payload, self.stage, self.timeout_s = payload, stage, timeout_s
        self._process: Process | None = None

    def start(self) -> Process:
        """The running process. Raises PluginError if the function can't be loaded there."""
        if self._process is not None:
            return self._process
        self._process = Process()
        deadline = time.monotonic() + START_LIMIT_S
        try:
            self._process.channel.send(self.payload, deadline)
            loaded: Failure | None = pickle.loads(self._process.channel.receive(deadline))
        except TimeoutError:
            loaded = Failure(f"the reward function was not loaded within {START_LIMIT_S:.0f} s")
        except EOFError:
            loaded = Failure(f"the process that loads the reward function {_ended(self.stop())}")
        if loaded is not None:
            self.stop()
            raise PluginError(self.stage, "", loaded.text)
        return self._process

    def stop(self) -> int:
        process, self._process = self._process, None
        return process.end() if process else 0

    def score(self, samples: list[dict[str, Any]], *, batch: bool) -> list[Outcome]:
        """An outcome for each sample.

        When async samples that run together get stuck, nothing tells which of them is at fault: those without outcome
        are then scored again one by one, each with the whole limit.
        """
        outcomes: dict[int, Outcome] = {}
        alone = False
        while len(outcomes) < len(samples):
            places = [i for i in range(len(samples)) if i not in outcomes]
            places = places[:1] if alone else places
            began: list[int] = []
            try:
                for done in self._run(
                    Job(samples=[samples[i] for i in places], batch=batch, timeout_s=self.timeout_s), began
                ):
                    outcomes[places[done.place]] = done.outcome
            except (TimeoutError, EOFError) as error:
                status = self.stop()
                bad: Outcome = Failure(f"its process {_ended(status)}") if isinstance(error, EOFError) else TimedOut()
                suspects = [places[i] for i in began if places[i] not in outcomes] or places[:1]
                alone = len(suspects) > 1 and not batch
                if not alone:
                    outcomes.update(dict.fromkeys(suspects, bad))
            except BaseException:  # an interrupt: the answers still to come belong to no later job
                self.stop()
                raise
        return [outcomes[i] for i in range(len(samples))]

    def _run(self, job: Job, began: list[int]) -> Iterator[Done]:
        """Puts out the samples as they are done; `began` holds the places that the worker is at.

        Raises TimeoutError or EOFError, after which the process must be stopped.
        """
        channel = self.start().channel
        deadline = time.monotonic() + BETWEEN_LIMIT_S
        channel.send(pickle.dumps(job), deadline)
        left = set(range(len(job.samples)))
        while left:
            message: Began | Done = pickle.loads(channel.receive(deadline))
            if isinstance(message, Began):
                began[:] = message.places
                deadline = time.monotonic() + message.limit_s
                continue
            left.discard(message.place)
            if not left.intersection(began):
                deadline = time.monotonic() + BETWEEN_LIMIT_S
            yield message


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended itself with exit status {status}"
