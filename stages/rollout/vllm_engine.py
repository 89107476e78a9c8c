"""vLLM's asynchronous engine, in the process of the stage; its core runs in a process of its own.

    submit        a task for each sample, in a thread with an event loop; vLLM batches them as it goes
    finished      groups of samples, as each group ends
    load_weights  pause -> files in shared memory, read by vLLM's workers -> the new version counts -> resume
    load_shared_weights    the same, of what the update stage has laid out for readers
    watched       a core that ends, or does not answer in time, is EngineDied for everybody who waits

The prompt of a group is computed once: its samples share it in vLLM's prefix cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from rollstream.stages.errors import EngineDied, StageError
from rollstream.stages.rollout import vllm_settings
from rollstream.stages.rollout.engine import Request, Sample, Sampling
from rollstream.stages.rollout.folder_tensors import FolderTensors
from rollstream.stages.rollout.model_limits import ModelLimits
from rollstream.stages.rollout.vllm_plugin import BACKEND
from rollstream.stages.rollout.weight_files import checksums, files_of
from rollstream.stages.shared_folder import make_folder
from rollstream.stages.shared_weights import SharedWeights

T = TypeVar("T")
#: What vLLM needs to load a model, or to take weights in.
START_S, LOAD_S = 1800.0, 600.0
#: A process that is killed is gone by then.
END_S = 10.0
#: Between two questions whether the core answers.
PROBE_S = 1.0


class VllmEngine:
    """See `Engine`. `updates` is one of WEIGHT_UPDATES, `args` are further settings of vLLM's AsyncEngineArgs; a core
    that gives no answer for `timeout_s` is taken for dead. `sampling` is that of all requests, but for its lengths.
    With `check_weights` its workers hold some tensors of each version against their checksums. `version` is that of the
    weights in use, `pids` are vLLM's processes."""

    continuous = True

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        stage: str,
        sampling: Sampling,
        updates: str,
        timeout_s: float,
        check_weights: bool,
        args: Mapping[str, Any],
    ):
        on_gpu = torch.cuda.is_available()
        vllm_settings.prepare_environment(on_gpu=on_gpu)
        self._stage, self.updates, self._timeout_s = stage, updates, timeout_s
        self._check_weights = check_weights
        self.version = 0
        self._asleep = False
        self._flying = 0
        self._ended: queue.Queue[tuple[str, list[Sample]] | BaseException] = queue.Queue()
        self._folder = make_folder()
        self._tensors = FolderTensors(model)
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()  # no weights are on their way
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: str | None = None
        self._death = asyncio.Event()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        settings = vllm_settings.engine_args(model, dtype, sampling, args, on_gpu=on_gpu)
        others = _children()
        self._engine: Any = self._wait(self._start(settings), START_S)
        self.pids = _children() - others
        self._limits = ModelLimits.of(model, context=self._engine.model_config.max_model_len)
        self._spawn(self._watch())

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        budget = self._limits.budget(request, self._stage)
        self._flying += 1
        self._loop.call_soon_threadsafe(self._spawn, self._group(request, budget))

    def finished(self, timeout_s: float) -> tuple[str, list[Sample]] | None:
        """See `Engine.finished`."""
        try:
            found = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, EngineDied):
            self._ended.put(found)  # for who asks again
        if isinstance(found, BaseException):
            raise found
        self._flying -= 1
        return found

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """See `Engine.load_weights`. Wrong weights leave the engine as it was."""
        arrived = list(tensors)
        if faults := self._tensors.faults(arrived):
            raise StageError(self._stage, f"weights of version {version}", "\n".join(faults))
        self._wait(self._load(version, lambda: self._send(arrived)), LOAD_S)

    def load_shared_weights(self, weights: SharedWeights) -> bool:
        """See `RolloutStage.load_shared_weights`. Where the weights are gone nothing is sampled until others are
        loaded."""
        return self._wait(self._load(weights.version, lambda: self._point_to(weights), weights.are_there), LOAD_S)

    def rest(self) -> None:
        """Gives the device's memory back until new weights come; those that it has are gone. Nothing may be under way.
        Needs engine_args enable_sleep_mode=True."""
        assert not self._flying, f"{self._flying} groups are under way"
        self._wait(self._sleep(), LOAD_S)

    def close(self) -> None:
        """See `Engine.close`."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._dead is None:
            with suppress(EngineDied):
                self._wait(self._stop(), self._timeout_s)
        self._end_processes()

    # In the loop's thread -----------------------------------------------------------------------------------------

    async def _start(self, settings: Mapping[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = WeightTransferConfig(backend=BACKEND)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings, weight_transfer_config=transfer))
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        return engine

    async def _stop(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self._engine.shutdown()

    async def ready(self) -> None:
        """Waits until no weights are on their way."""
        await self._open.wait()

    async def _group(self, request: Request, budget: int) -> None:
        """All samples of a request, side by side."""
        from rollstream.stages.rollout.vllm_sample import Draw

        stop_ids = sorted({*self._limits.eos_ids, *request.sampling.stop_token_ids})
        draws = [
            Draw(sample_id, request.prompt_ids, budget, request.sampling, stop_ids, self._stage)
            for sample_id in request.sample_ids
        ]
        stream = self.updates in ("recompute", "keep")
        runs = [draw.run(self._engine.generate, self, draw.sample_id, stream=stream) for draw in draws]
        tasks: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._alive(run)) for run in runs]
        except* (EngineDied, StageError) as errors:  # the first; its siblings are cut off
            raise errors.exceptions[0] from None
        self._ended.put((request.request_id, [task.result() for task in tasks]))

    async def _sleep(self) -> None:
        if not self._asleep:
            await self._alive(self._engine.sleep(level=2))
            self._asleep = True

    async def _load(
        self, version: int, update: Callable[[], Coroutine[Any, Any, None]], is_whole: Callable[[], bool] = lambda: True
    ) -> bool:
        """Takes new weights, which `update` brings to the workers. False, and paused still, where they turn out not to
        be whole."""
        engine = self._engine
        self._open.clear()
        try:
            if self._asleep:
                await self._alive(engine.wake_up())
                self._asleep = False
            mode = {"resume": "abort"}.get(self.updates, "keep")
            await self._alive(engine.pause_generation(mode=mode, clear_cache=self.updates != "keep"))
            await self._alive(engine.start_weight_update())
            await update()
            await self._alive(engine.finish_weight_update())
            if not is_whole():
                return False
            self.version = version  # all that was sampled before has been taken in: it came by the same way
            await self._alive(engine.resume_generation())
        except BaseException as error:
            self._die(f"it took the weights of version {version} in part only: {error}")
            self._open.set()
            raise
        self._open.set()
        return True

    async def _send(self, tensors: Sequence[tuple[str, np.ndarray]]) -> None:
        """By way of files."""
        sums = checksums(tensors) if self._check_weights else {}
        files = iter(files_of(tensors, self._folder))
        while (path := await asyncio.to_thread(next, files, None)) is not None:
            await self._tell_workers({"path": str(path), "checksums": sums})
            path.unlink()

    async def _point_to(self, weights: SharedWeights) -> None:
        if weights.are_there():
            await self._tell_workers({"shared": dataclasses.asdict(weights)})

    async def _tell_workers(self, update: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._alive(self._engine.update_weights(WeightTransferUpdateRequest(update_info=update)))

    async def _watch(self) -> None:
        """Asks the core whether it is there, while anybody waits for it."""
        while True:
            await asyncio.sleep(PROBE_S)
            if self._engine.errored:
                self._die(f"vLLM's core has ended: {self._engine.dead_error}")
                return
            if self._flying and self._open.is_set():
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._alive(self._engine.is_sleeping())
                except TimeoutError:
                    self._die(f"vLLM's core gave no answer for {self._timeout_s:g} s")
                    return

    async def _alive(self, call: Coroutine[Any, Any, T]) -> T:
        """What the call gives, or EngineDied: a call that the core died on would never answer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        answer, death = asyncio.create_task(call), asyncio.create_task(self._death.wait())
        try:
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineDied(self._dead)
            return answer.result()
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's core has ended: {error}") from None
        finally:
            answer.cancel()
            death.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs it as a task; its error is for whoever waits for samples."""

        async def told() -> None:
            try:
                await work
            except EngineDied as error:
                self._die(str(error))
            except Exception as error:  # noqa: BLE001 - the thread's boundary: raised again by `finished`
                self._ended.put(error)

        if threading.current_thread().name != "vllm":
            self._loop.call_soon_threadsafe(self._spawn, work)
            return
        task = self._loop.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What it gives, from another thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise EngineDied(f"vLLM's core gave no answer for {timeout_s:g} s") from None

    def _die(self, why: str) -> None:
        if self._dead is None:
            self._dead = why
            self._death.set()
            self._end_processes()  # one that hangs would keep its memory
            self._ended.put(EngineDied(why))

    def _end_processes(self) -> None:
        ending: list[psutil.Process] = []
        for pid in self.pids:
            with suppress(psutil.Error):
                ending.append(psutil.Process(pid))
                ending[-1].kill()
        psutil.wait_procs(ending, timeout=END_S)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
