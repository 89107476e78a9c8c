"""vLLM's asynchronous engine, in the process of the stage; its core runs in a process of its own.

    submit        a task for each sample, in a thread with an event loop; vLLM batches them as it goes
    finished      groups of samples, as each group ends
    load_weights  pause -> files in shared memory, read by vLLM's workers -> the new version counts -> resume
    watched       a core that ends, or does not answer in time, is EngineDied for everybody who waits

The prompt of a group is computed once: its samples share it in vLLM's prefix cache.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from rollstream.stages.errors import EngineDied
from rollstream.stages.rollout import vllm_settings
from rollstream.stages.rollout.engine import Request, Sample, Sampling
from rollstream.stages.rollout.folder_tensors import FolderTensors
from rollstream.stages.rollout.model_limits import ModelLimits
from rollstream.stages.rollout.vllm_plugin import BACKEND

T = TypeVar("T")
#: What vLLM needs to load a model, or to take weights in.
START_S, LOAD_S = 1800.0, 600.0
#: Between two questions whether the core answers.
PROBE_S = 1.0
#: Of the tensors in one file.
FILE_BYTES = 256 * 1024 * 1024

logger = logging.getLogger(__name__)


class VllmEngine:
    """See `Engine`. `updates` is one of WEIGHT_UPDATES, `args` are further settings of vLLM's AsyncEngineArgs; a core
    that gives no answer for `timeout_s` is taken for dead. `sampling` is that of all requests, but for its lengths."""

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
        args: Mapping[str, Any],
    ):
        on_gpu = torch.cuda.is_available()
        vllm_settings.prepare_environment(on_gpu=on_gpu)
        self._stage, self._updates, self._timeout_s = stage, updates, timeout_s
        self.version = 0
        self._flying = 0
        self._ended: queue.Queue[tuple[str, list[Sample]] | BaseException] = queue.Queue()
        self._folder = Path(
            tempfile.mkdtemp(prefix="rollstream-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        )
        self._tensors = FolderTensors(model)
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()  # no weights are on their way
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: str | None = None
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        settings = vllm_settings.engine_args(model, dtype, sampling, args, on_gpu=on_gpu)
        self._engine: Any = self._wait(self._start(settings), START_S)
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
            if self._dead is not None:
                raise EngineDied(self._dead) from None
            return None
        if isinstance(found, BaseException):
            raise found
        self._flying -= 1
        return found

    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """See `Engine.load_weights`."""
        self._wait(self._load(version, tensors), LOAD_S)

    def close(self) -> None:
        """See `Engine.close`."""
        shutil.rmtree(self._folder, ignore_errors=True)
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
        stream = self._updates in ("recompute", "keep")
        runs = [draw.run(self._engine.generate, self, draw.sample_id, stream=stream) for draw in draws]
        self._ended.put((request.request_id, await self._alive(asyncio.gather(*runs))))

    async def _load(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine, checked = self._engine, self._tensors.check(version, tensors, self._stage)
        self._open.clear()
        try:
            mode = {"resume": "abort"}.get(self._updates, "keep")
            await self._alive(engine.pause_generation(mode=mode, clear_cache=self._updates != "keep"))
            await self._alive(engine.start_weight_update())
            for path in files_of(checked, self._folder):
                update = WeightTransferUpdateRequest(update_info={"path": str(path)})
                await self._alive(engine.update_weights(update))
                path.unlink()
            await self._alive(engine.finish_weight_update())
            self.version = version  # all that was sampled before has been taken in: it came by the same way
            await self._alive(engine.resume_generation())
        finally:
            self._open.set()

    async def _watch(self) -> None:
        """Asks the core whether it is there, while anybody waits for it."""
        while True:
            await asyncio.sleep(PROBE_S)
            if self._flying and self._open.is_set():
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._alive(self._engine.is_sleeping())
                except TimeoutError:
                    self._die(f"vLLM's core gave no answer for {self._timeout_s:g} s")
                    return

    async def _alive(self, call: Awaitable[T]) -> T:
        """What the call gives; its error as ours where the core is gone."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's core has ended: {error}") from None

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
            self._end_processes()  # one that hangs would keep its memory

    def _end_processes(self) -> None:
        """vLLM's processes are the children of this one that it has told of itself by name or by its module."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child.name().startswith("VLLM") or "multiprocessing" in " ".join(child.cmdline()):
                    child.kill()


def files_of(tensors: Iterable[tuple[str, np.ndarray]], folder: Path) -> Iterable[Path]:
    """The tensors in order, in safetensors files of at most FILE_BYTES (or one tensor that is larger)."""
    from safetensors.numpy import save_file

    def written(bucket: Mapping[str, np.ndarray]) -> Path:
        path = folder / "weights.safetensors"
        save_file(dict(bucket), path)
        return path

    bucket: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if bucket and size + array.nbytes > FILE_BYTES:
            yield written(bucket)
            bucket, size = {}, 0
        bucket[name] = np.ascontiguousarray(array)
        size += array.nbytes
    if bucket:
        yield written(bucket)
