"""The process in which a reward function runs: `python -m rollstream.stages.reward.worker LIFE_FD`.

    stage                                   worker
      | the function, pickled   ------------>  |  loads it
      |  <--------------------  null or Failure|
      | Job                     ------------>  |
      |  <--------------------  Began, Done .. |  one Done a sample
      | ...                                    |

It ends with its stage, and it may be killed at any moment. Its main thread runs the function, so that signals such as
SIGALRM work there. Needs Linux.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Awaitable, Sequence
from typing import Any

import cloudpickle

from rollstream.stages.errors import DataError
from rollstream.stages.plugins import name_source
from rollstream.stages.reward.channel import Channel
from rollstream.stages.reward.outcome import Began, Done, Failure, Job, Outcome, Score, TimedOut, as_score

#: Time that an async function which overran gets to be cancelled before its process is killed.
CANCEL_S = 0.25


def end_with_parent(life_fd: int) -> None:
    """Kills this process group when the other end of the pipe closes, which it does however the parent ends.

    The kernel sends the signal: it also ends a call that holds the interpreter lock, and children of the function. The
    signal that Linux offers for a parent's death comes when the parent's thread ends, which is too early.
    """
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(life_fd, 0)
    if poll.poll(0):  # the parent ended before the signal was asked for
        os._exit(1)


def take_pipes() -> Channel:
    """Standard input and output become the channel; what the function prints goes to standard error."""
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return channel


def failure_of(error: BaseException) -> Failure:
    """The error with its traceback from the function's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Failure(text, isinstance(error, DataError))


class Worker:
    """Scores jobs one after the other with one function."""

    def __init__(self, channel: Channel):
        self.channel = channel
        #: One event loop for life: clients that the function keeps between samples stay usable.
        self.runner = asyncio.Runner()
        self.function: Any = None
        self.params: dict[str, Any] = {}

    def serve(self) -> None:
        """Until the stage closes the channel."""
        try:
            self.function, self.params, source_file = cloudpickle.loads(self.channel.receive(None))
            name_source(self.function, source_file)
            loaded = None
        except BaseException as error:  # noqa: BLE001 - the error goes to the stage
            loaded = failure_of(error)
        self.send(loaded)
        while True:
            job: Job = pickle.loads(self.channel.receive(None))
            if job.batch:
                self.score_batch(job)
            else:
                self.score_each(job)

    def send(self, message: object) -> None:
        self.channel.send(pickle.dumps(message), None)

    def score_each(self, job: Job) -> None:
        """One call a sample; what turns out to be awaitable is awaited at the end, all together."""
        waiting: dict[int, Awaitable[object]] = {}
        for place, sample in enumerate(job.samples):
            self.send(Began((place,), job.timeout_s))
            try:
                returned = self.function(**_decoded(sample), **self.params)
                if inspect.isawaitable(returned):
                    waiting[place] = returned
                    continue
                outcome: Outcome = as_score(returned)
            except BaseException as error:  # noqa: BLE001 - the error goes to the stage
                outcome = failure_of(error)
            self.send(Done(place, outcome))
        if waiting:
            self.send(Began(tuple(waiting), job.timeout_s + CANCEL_S))
            self.runner.run(self._finish_all(waiting, job.timeout_s))

    def score_batch(self, job: Job) -> None:
        """One call for all samples."""
        places = tuple(range(len(job.samples)))
        limit_s = job.timeout_s * len(places)
        self.send(Began(places, limit_s + CANCEL_S))
        try:
            samples = [_decoded(sample) for sample in job.samples]
            columns = {name: [sample[name] for sample in samples] for name in samples[0]}
            returned = self.function(**columns, **self.params)
            if inspect.isawaitable(returned):
                returned = self.runner.run(_in_time(returned, limit_s))
            outcomes = [returned] * len(places) if isinstance(returned, TimedOut) else _as_scores(returned, len(places))
        except BaseException as error:  # noqa: BLE001 - the error goes to the stage
            outcomes = [failure_of(error)] * len(places)
        for place, outcome in zip(places, outcomes, strict=True):
            self.send(Done(place, outcome))

    async def _finish_all(self, waiting: dict[int, Awaitable[object]], timeout_s: float) -> None:
        async def finish(place: int, awaitable: Awaitable[object]) -> None:
            try:
                returned = await _in_time(awaitable, timeout_s)
                outcome = returned if isinstance(returned, TimedOut) else as_score(returned)
            except BaseException as error:  # noqa: BLE001 - the error goes to the stage
                outcome = failure_of(error)
            self.send(Done(place, outcome))

        await asyncio.gather(*(finish(place, awaitable) for place, awaitable in waiting.items()))


async def _in_time(awaitable: Awaitable[object], timeout_s: float) -> object:
    """What it returns, or TimedOut; a TimeoutError of its own passes."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            return TimedOut()
        raise


def _as_scores(returned: object, wanted: int) -> Sequence[Score]:
    if not isinstance(returned, list | tuple):
        raise TypeError(f"a batch reward function must return a list, got {type(returned).__name__}")
    if len(returned) != wanted:
        raise ValueError(f"a batch reward function must return a score a sample: {wanted}, got {len(returned)}")
    return [as_score(one) for one in returned]


def _decoded(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample's arguments; target and meta are decoded anew each time, so that a function may change them."""
    return {name: json.loads(value) if name in ("target", "meta") else value for name, value in sample.items()}


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    worker = Worker(take_pipes())
    try:
        worker.serve()
    except EOFError:  # the stage closed the channel
        os._exit(0)


if __name__ == "__main__":
    main()
