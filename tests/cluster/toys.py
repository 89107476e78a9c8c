"""Small stages without a model: they count, and say what they saw. Their weights are one number, the version."""

from __future__ import annotations

import builtins
import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollstream.graphs import Graph, Weights
from rollstream.stages.base import (
    LARGEST,
    SMALLEST,
    Filtered,
    MapStage,
    RolloutStage,
    Source,
    UpdateStage,
    check_wiring,
)
from rollstream.stages.schema import Advantaged, Prompted, Rollouts, Scored, Trained, WithRef


class Numbers(Source[Prompted]):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        count: int | None = None

    def rows(self, skip, start) -> Iterator[pa.RecordBatch]:
        order = start
        while self.config.count is None or order < self.config.count:
            if order not in skip:
                row = [f"g{order}", order, f"p{order}", [order], "null", "{}"]
                yield pa.RecordBatch.from_arrays(
                    [pa.array([v], t) for v, t in zip(row, Prompted.columns.values(), strict=True)],
                    schema=Prompted.arrow(),
                )
            order += 1

    def fingerprint(self) -> str:
        return f"numbers to {self.config.count}"


def note(file: str, event: str) -> None:
    if file:
        with open(file, "a") as events:
            events.write(event + "\n")


class HeldOut(Numbers):
    def __len__(self) -> int:
        return self.config.count


class Versions(MapStage[Rollouts, Scored]):
    """The reward is the version of the weights that made a sample."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        die_once: str = ""  # a file: where it is there already, the stage lives
        waits_for: str = ""  # a file: the stage does nothing until it is there
        fails: bool = False

    def process(self, group):
        give_up = time.monotonic() + 60
        while self.config.waits_for and not Path(self.config.waits_for).exists():
            assert time.monotonic() < give_up, f"{self.config.waits_for} did not come"
            time.sleep(0.1)
        if self.config.fails:
            raise ZeroDivisionError("the toy divides by zero")
        if self.config.die_once and not Path(self.config.die_once).exists():
            Path(self.config.die_once).touch()
            os._exit(7)
        versions = [float(ids[0]) for ids in group.column("response_ids").to_pylist()]
        for version in versions:
            self.metrics.add("reward/least", version, SMALLEST)
            self.metrics.add("reward/most", version, LARGEST)
        parts = pa.array([{}] * len(versions), Scored.columns["reward_parts"])
        return {"reward": pa.array(versions), "reward_parts": parts}


class Echo(RolloutStage[Prompted, Rollouts]):
    """Two samples a prompt, whose one token is the version of the weights."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        temperature: float = 1.0
        sleep_s: float = 0.0
        dies: bool = False
        response_chars: int = 1
        events: str = ""  # a file that says what was done, in order

    version = -1
    groups_in_flight = 2

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        note(self.config.events, "new process")

    def setup(self, world) -> None:
        note(self.config.events, "set up")
        if self.config.events:
            Path(f"{self.config.events}.pid").write_text(str(os.getpid()))

    def close(self) -> None:
        note(self.config.events, "close")

    def submit(self, group: pa.RecordBatch) -> None:
        self.__dict__.setdefault("groups", []).append(group)

    def finished(self, timeout_s: float) -> pa.RecordBatch | None:
        if not self.groups:
            return None
        note(self.config.events, "generate")
        time.sleep(self.config.sleep_s)
        if self.config.dies:
            os._exit(7)
        prompt = self.groups.pop(0).to_pylist()[0]
        new = {
            "response": "x" * self.config.response_chars,
            "response_ids": [self.version],
            "loss_mask": [True],
            "finish_reason": "stop",
        }
        new |= {"rollout_logprobs": [0.0], "weight_version": [self.version]}
        rows = [prompt | {"sample_id": f"{prompt['group_id']}.{i}"} | new for i in range(2)]
        return pa.RecordBatch.from_pylist(rows, schema=Rollouts.arrow())

    def load_weights(self, version, tensors) -> None:
        ((_, value),) = list(tensors)
        assert int(value[0]) == version
        self.version = version
        note(self.config.events, f"load {version}")

    def rest(self) -> None:
        assert not self.__dict__.get("groups")
        note(self.config.events, "rest")


class Score(MapStage[Rollouts, Scored]):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        fail_at: int = -1
        error: str = "ZeroDivisionError"
        stick_at: int = -1
        stick_once: str = ""  # a file: where it is there already, the stage does not stick
        die_at: int = -1
        filter_at: int = -1
        loads: bool = True

    def setup(self, world) -> None:
        if not self.config.loads:
            raise OSError("the toy does not load")

    def process(self, group):
        order = group.column("order")[0].as_py()
        if order == self.config.fail_at:
            raise getattr(builtins, self.config.error)("the toy divides by zero")
        if order == self.config.stick_at and not (self.config.stick_once and Path(self.config.stick_once).exists()):
            if self.config.stick_once:
                Path(self.config.stick_once).touch()
            time.sleep(600)
        if order == self.config.die_at:
            os._exit(7)
        if order == self.config.filter_at:
            return Filtered("the toy does not like it")
        self.metrics.add("reward/mean", float(order), 1)
        rows = group.num_rows
        return {
            "reward": pa.array([float(order)] * rows),
            "reward_parts": pa.array([{}] * rows, Scored.columns["reward_parts"]),
        }


class Weigh(MapStage[Scored, Advantaged]):
    def process(self, group):
        return {"advantages": pa.array([[1.0]] * group.num_rows, pa.list_(pa.float32()))}


class Ref(MapStage[Rollouts, WithRef]):
    def process(self, group):
        return {"ref_logprobs": pa.array([[0.0]] * group.num_rows, pa.list_(pa.float32()))}


class Count(UpdateStage[Advantaged, Trained]):
    """Writes down which groups it was given, and the versions that made them."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        diary: str
        groups_per_step: int = 4
        num_ranks: int = 1
        sleep_s: float = 0.0
        full_disk_at: int = -1
        events: str = ""
        kills_engine_at: int = -1  # the one whose events these are, in this step; its new process is there at its end

    def __call__(self, stream, *, ref=None):
        check_wiring(self, stream, Advantaged)
        return self._wire(stream=stream, **({"ref": ref} if ref else {}))

    version = 0

    @property
    def num_ranks(self) -> int:
        return self.config.num_ranks

    @property
    def groups_per_step(self) -> int:
        return self.config.groups_per_step

    @property
    def data_parallel_size(self) -> int:
        return self.config.num_ranks

    def share_of(self, rank: int) -> int:
        return rank

    def setup(self, world) -> None:
        self.rank = world.rank
        Path(f"{self.config.diary}.pid").write_text(str(os.getpid()))

    def update(self, groups):
        note(self.config.events, "train")
        time.sleep(self.config.sleep_s)
        if self.version + 1 == self.config.kills_engine_at:
            self._kill_engine()
        rows = [
            {
                "rank": self.rank,
                "order": g.column("order")[0].as_py(),
                "made_by": g.column("weight_version")[0].as_py()[0],
                "trained_at": self.version,
                "columns": g.schema.names,
            }
            for g in groups
        ]
        with open(f"{self.config.diary}.{self.rank}", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self.version += 1
        return {"actor/loss": (float(len(rows)), 1.0), "actor/tokens": (2.0 * len(rows), 1.0)}

    def _kill_engine(self) -> None:
        events = Path(self.config.events)
        os.kill(int(Path(f"{events}.pid").read_text()), signal.SIGKILL)
        before, give_up = events.read_text().count("new process"), time.monotonic() + 60
        while events.read_text().count("new process") == before:
            assert time.monotonic() < give_up, "it is not started again"
            time.sleep(0.1)
        time.sleep(1.5)  # it would be set up by then
        note(self.config.events, "trained")

    def weights(self):
        if self.rank == 0:
            yield "number", np.array([self.version])

    def save(self, folder: Path) -> None:
        note(self.config.events, "save")
        (folder / f"rank{self.rank}").write_text(str(self.version))
        self.saving = self.version

    def finish_save(self) -> None:
        if self.saving == self.config.full_disk_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, folder: Path) -> None:
        self.version = int((folder / f"rank{self.rank}").read_text())

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "number").write_text(str(self.version))


def toy_graph(
    diary: Path,
    *,
    max_staleness=0,
    count=None,
    with_ref=False,
    echo=None,
    score=None,
    bounds=None,
    evaluations=(),
    **update,
) -> Graph:
    rollouts = Echo(Echo.Config(**(echo or {})))(Numbers(Numbers.Config(count=count)))
    scored = Score(Score.Config(**(score or {})))(rollouts)
    ref = Ref()(rollouts) if with_ref else None
    output = Count(Count.Config(diary=str(diary), **update))(Weigh()(scored), ref=ref)
    weights = Weights(output, to=rollouts, max_staleness=max_staleness)
    return Graph("toy", output=output, weights=weights, bounds=bounds, evaluations=evaluations)


def diary_of(path: Path) -> list[dict]:
    """What the update stage wrote down, all ranks."""
    files = sorted(path.parent.glob(f"{path.name}.[0-9]*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
