"""Runs a rollout function for each sample, between the stage and the engine.

    submit      a coroutine for each sample of the group, all in one thread with an event loop
    coroutine   function(engine, prompt, tools); each draw of the engine is news for the stage: Ask, and at last End
    finished    hears the news, hands requests to the engine and samples to the coroutines, until a group is whole

Only the stage's thread touches the engine. A request has one sample with an id of its own: the sample's, then that with
#2, #3 and so on, so that each turn has its own random numbers. An engine that is not continuous is asked once every
coroutine waits for it, so that its batches are large.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from rollstream.stages.base import Metrics
from rollstream.stages.errors import PluginError
from rollstream.stages.rollout.engine import Engine, Request, Sample
from rollstream.stages.rollout.episode import Episode
from rollstream.stages.rollout.function import Function, Tool
from rollstream.stages.rollout.model_limits import ModelLimits
from rollstream.stages.rollout.trajectory import Prompt, Trajectory
from rollstream.stages.rollout.turn_engine import TurnEngine

#: How long to wait for the engine, or for news, before looking for the other.
ENGINE_S, NEWS_S = 0.005, 0.05
#: For tasks to end when all is closed; and for a batch of an engine that is not continuous.
CLOSE_S, BATCH_S = 5.0, 3600.0


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """See `Rollout.Config`."""

    max_turns: int
    max_turn_tokens: int | None
    turn_timeout_s: float


@dataclass(frozen=True)
class _Ask:
    episode: Episode
    request: Request
    answer: asyncio.Future[Sample]


@dataclass(frozen=True)
class _End:
    episode: Episode
    trajectory: Trajectory | None
    sample: Sample | str  # or the function's traceback


class Episodes:
    """Takes groups and gives samples as an engine does. `version` is that of the weights in use; `tokenizer` is used in
    the loop's thread and must be nobody else's.

    Metrics: `rollout/turns` of a sample, `rollout/said_tokens` tokens of a response that the policy did not sample.
    """

    def __init__(
        self,
        engine: Engine,
        function: Function,
        tools: Mapping[str, Tool],
        *,
        tokenizer: object,
        model_limits: ModelLimits,
        limits: EpisodeLimits,
        stage: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.version = 0
        self._engine, self._function, self._tools = engine, function, tools
        self._tokenizer, self._model_limits, self._limits = tokenizer, model_limits, limits
        self._stage, self._metrics, self._clock = stage, metrics, clock
        self._news: queue.Queue[_Ask | _End] = queue.Queue()
        self._live: set[Episode] = set()
        self._asked: dict[str, _Ask] = {}  # what the engine has, by request
        self._samples: dict[str, list[Sample | None]] = {}  # by group
        self._whole: deque[str] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def submit(self, request: Request, group: pa.RecordBatch) -> None:
        """Begins the samples of a group, one for each of the request's ids. Raises as `Engine.submit` does."""
        room = self._model_limits.budget(request, self._stage)
        self._samples[request.request_id] = [None] * len(request.sample_ids)
        for place, sample_id in enumerate(request.sample_ids):
            prompt = Prompt(
                sample_id=sample_id,
                ids=tuple(request.prompt_ids),
                text=group.column("prompt")[0].as_py(),
                target=json.loads(group.column("target")[0].as_py()),
                meta=json.loads(group.column("meta")[0].as_py()),
                max_tokens=room,
                max_turns=self._limits.max_turns,
            )
            episode = Episode(request.request_id, place, prompt, since=self._clock())
            self._live.add(episode)
            self._loop.call_soon_threadsafe(self._begin, episode, request)

    def finished(self, timeout_s: float) -> tuple[str, list[Sample]] | None:
        """See `Engine.finished`. Raises PluginError naming the sample for which the function raised, returned no
        trajectory of its prompt, or left the engine waiting for longer than `turn_timeout_s`."""
        deadline = self._clock() + timeout_s
        while self._live or self._whole:
            self._hear(0.0)
            if self._whole:
                group_id = self._whole.popleft()
                return group_id, [sample for sample in self._samples.pop(group_id) if sample is not None]
            self._check_deadlines()
            left_s = deadline - self._clock()
            if self._engine.continuous and left_s <= 0:
                return None
            if self._engine.continuous and self._asked:
                self._answer(self._engine.finished(min(left_s, ENGINE_S)))
            elif not self._engine.continuous and all(episode.num_asked for episode in self._live):
                for _ in range(len(self._asked)):
                    self._answer(self._engine.finished(BATCH_S))
            else:
                self._hear(NEWS_S if not self._engine.continuous else min(left_s, NEWS_S))
        return None

    def close(self) -> None:
        """Ends the coroutines. A thread that one of them holds up ends with the process."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    # In the stage's thread ----------------------------------------------------------------------------------------

    def _hear(self, wait_s: float) -> None:
        """Takes in all news there are; waits for the first."""
        with suppress(queue.Empty):
            self._take(self._news.get(timeout=wait_s) if wait_s else self._news.get_nowait())
            while True:
                self._take(self._news.get_nowait())

    def _take(self, news: _Ask | _End) -> None:
        episode = news.episode
        if isinstance(news, _Ask):
            episode.num_asked += 1
            self._asked[news.request.request_id] = news
            self._engine.submit(news.request)
            return
        if isinstance(news.sample, str):
            raise PluginError(self._stage, f"sample {episode.prompt.sample_id}", news.sample)
        assert news.trajectory is not None
        assert news.sample.loss_mask is not None
        self._metrics.add("rollout/turns", news.trajectory.num_turns)
        self._metrics.add("rollout/said_tokens", (~news.sample.loss_mask).sum())
        self._live.discard(episode)
        samples = self._samples[episode.group_id]
        samples[episode.place] = news.sample
        if all(sample is not None for sample in samples):
            self._whole.append(episode.group_id)

    def _answer(self, done: tuple[str, list[Sample]] | None) -> None:
        """Gives a request's sample to who waits for it."""
        if done is None:
            return
        request_id, (sample,) = done
        ask = self._asked.pop(request_id)
        ask.episode.num_asked -= 1
        ask.episode.since = self._clock()
        self._loop.call_soon_threadsafe(lambda: ask.answer.done() or ask.answer.set_result(sample))

    def _check_deadlines(self) -> None:
        limit_s, now = self._limits.turn_timeout_s, self._clock()
        late = [episode for episode in self._live if not episode.num_asked and now - episode.since > limit_s]
        if not late:
            return
        # One that holds the loop up makes others late: it is the one to name.
        holding = asyncio.current_task(self._loop)
        episode = next((e for e in late if holding is not None and e.task is holding), min(late, key=lambda e: e.since))
        where = episode.whereabouts(self._loop, self._thread.ident or 0)
        raise PluginError(
            self._stage,
            f"sample {episode.prompt.sample_id}",
            f"The rollout function neither ended nor asked the engine for {limit_s:g} s (turn_timeout_s). It is{where}",
        )

    # In the loop's thread -----------------------------------------------------------------------------------------

    def _begin(self, episode: Episode, request: Request) -> None:
        episode.task = self._loop.create_task(self._play(episode, request))

    async def _play(self, episode: Episode, request: Request) -> None:
        async def draw(token_ids: Sequence[int], max_tokens: int) -> Sample:
            episode.num_requests += 1
            sample_id = episode.prompt.sample_id
            name = sample_id if episode.num_requests == 1 else f"{sample_id}#{episode.num_requests}"
            sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens)
            one = Request(request_id=name, prompt_ids=list(token_ids), sample_ids=(name,), sampling=sampling)
            answer: asyncio.Future[Sample] = self._loop.create_future()
            self._news.put(_Ask(episode, one, answer))
            return await answer

        engine = TurnEngine(
            draw,
            tokenizer=self._tokenizer,
            vocabulary=self._model_limits.vocabulary,
            max_turn_tokens=self._limits.max_turn_tokens,
            version=lambda: self.version,
        )
        try:
            tools = episode.wrapped(self._tools)
            trajectory = await self._function(engine=engine, prompt=episode.prompt, tools=tools)
            self._news.put(_End(episode, trajectory, _checked(trajectory, episode.prompt)))
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: raised by `finished`
            self._news.put(_End(episode, None, _text(error)))

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S / 2)
        self._loop.stop()


def _checked(trajectory: object, prompt: Prompt) -> Sample:
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"a rollout function must return a Trajectory, got {type(trajectory).__name__}")
    if trajectory.prompt is not prompt:
        raise ValueError("a rollout function must return a Trajectory of its own prompt, got one of another sample")
    return trajectory.sample()


def _text(error: BaseException) -> str:
    """The error with its traceback from the function's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
