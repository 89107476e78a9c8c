"""The processes of small_world.py: edges that can die, and stand-ins of stages.

A stand-in does one thing a turn, as StageHost would: leases, or works on one group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from rollstream.graphs.edge_actor import GENERATOR_AHEAD, EdgeActor, EdgeSettings, PeerDied
from rollstream.graphs.item import Item


class Brought:
    """What a stream brings: awaited for its value, or its error."""

    def __init__(self, value: Any):
        self.value = value

    def __await__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value
        yield


class Stream:
    """One call of `produce`."""

    def __init__(self, holder: str = "", known: tuple[int, Collection[int]] = (0, ())):
        self.holder, self.known = holder, known
        self.dead = self.ended = False  # its caller died; it has brought all
        self.objects: deque[Brought] = deque()
        self._more = asyncio.Event()

    def put(self, value: Any, *, last: bool = False) -> None:
        self.objects.append(Brought(value))
        self.end() if last else self._more.set()

    def end(self) -> None:
        self.ended = True
        self._more.set()

    async def __anext__(self) -> Brought:
        while not self.objects:
            if self.ended:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self.objects.popleft()


class Edge:
    """Handle of an edge that can die. `deaf`: calls that nobody waits for do not reach it."""

    def __init__(self, world: Any, settings: EdgeSettings):
        self.world, self.settings, self.deaf = world, settings, False
        self.start()

    def start(self) -> None:
        self.actor = EdgeActor(self.settings)
        self.pulls: set[asyncio.Task[Any]] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.past_bounds = 0
        self._put, self.actor._queue.put = self.actor._queue.put, self._checked_put

    def die(self) -> None:
        self.actor._journal and self.actor._journal.close()
        for task in self.tasks:
            task.cancel()
        for host in self.world.hosts[self.settings.producer]:
            for stream in host.calls:
                stream.dead = True
        self.start()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **named: self._call(method, args, named))

    def _call(self, method: str, args: Any, named: Any) -> Any:
        if self.deaf and method in ("ack", "retire", "renew", "pull"):
            return None
        task = self.world.loop.create_task(getattr(self.actor, method)(*args, **named))
        tasks = [self.tasks, self.pulls] if method == "pull" else [self.tasks]
        for kept in tasks:
            kept.add(task)
            task.add_done_callback(kept.discard)
        return task

    def _checked_put(self, item: Item) -> bool:
        """The bounds are passed by one group of each producer at most."""
        self.past_bounds = 0 if self.actor._queue.has_room() or not self.actor._opened else self.past_bounds + 1
        assert self.past_bounds <= len(self.pulls), f"{self.settings.name} is pulled past its bounds"
        return self._put(item)


class Host:
    """Stand-in of a stage's process."""

    def __init__(self, world: Any, stage: str, number: int):
        self.world, self.stage, self.number = world, stage, number
        self.calls: deque[Stream] = deque()  # of `produce`; the first one runs
        self.batch: deque[Item] = deque()  # leased, and not worked on yet
        self.loaded = True
        self.is_set_up = SimpleNamespace(remote=lambda: self.loaded)
        self.produce = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._produce))

    def die(self) -> None:
        """What it has put out comes through."""
        for stream in self.calls:
            stream.put(RayActorError(), last=True)
        self.calls.clear()
        self.batch.clear()
        self.loaded = False

    def _produce(self, holder: str, known: tuple[int, Collection[int]]) -> Stream:
        stream = Stream(holder, known)
        self.calls.append(stream) if self.loaded else stream.put(PeerDied("new"), last=True)
        return stream

    def turn(self) -> None:
        if not self.calls:
            return
        stream = self.calls[0]
        if len(stream.objects) >= GENERATOR_AHEAD and not stream.dead:  # Ray lets it go on where its caller is dead
            return
        if self.stage == "prompts":
            self._turn_of_source(stream)
        elif self.batch:
            self._work(self.batch.popleft(), stream)
        else:
            self._lease(stream)

    def _turn_of_source(self, stream: Stream) -> None:
        below, others = stream.known
        order = next((o for o in range(below, self.world.num_groups) if o not in others), None)
        if order is None or stream.dead:
            self._end(stream)
            return
        stream.known = (order + 1, others)
        stream.put(self.world.made(order, f"{order}", 0, (), "prompts"))

    def _lease(self, stream: Stream) -> None:
        world, rollout = self.world, self.stage == "rollout"
        inlet = world.edges["prompts" if rollout else "rollout"]
        lease = world.ask(
            lambda: inlet.lease.remote(self.stage, 1 + rollout, holder=stream.holder, fill=rollout, timeout_s=0)
        )
        self.batch.extend(lease.items)
        self.version = world.version
        if lease.ended:
            self._end(stream)
        if rollout:
            assert all(item.order < world.below() for item in lease.items), "admission is passed"

    def _work(self, item: Item, stream: Stream) -> None:
        world = self.world
        if self.stage == "score" and item.order in world.poison:
            world.kill_host(self)
        elif self.stage == "score" and item.order in world.filtered:
            stream.put((Item(**{**item.__dict__, "filtered": "dull"}), None))
        elif self.stage == "rollout":
            stream.put(world.made(item.order, f"{item.order}.{next(world.numbers)}", self.version, (), "rollout"))
        else:
            stream.put(world.made(item.order, item.birth, item.version, item.parts, self.stage))

    def _end(self, stream: Stream) -> None:
        stream.end()
        self.calls.remove(stream)
