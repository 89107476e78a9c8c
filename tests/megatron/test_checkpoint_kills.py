"""Checkpoints of a real policy through kills and full disks: what is trained is never lost and never trained twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from rollstream.graphs.checkpoint import Checkpoints, RunState
from rollstream.stages.actor import ActorUpdate
from rollstream.stages.base import World
from rollstream.stages.errors import CheckpointError
from rollstream.stages.megatron import checkpoint_writer
from rollstream.stages.megatron.layout import Layout

pytestmark = pytest.mark.megatron

NUM_KILLS = 12
#: Of a save, each with its end. A save is written while the next step trains.
PHASES = {"saving": "begun", "begun": "written", "written": "saved"}
MAX_SAVES = 2  # in a life that is killed
DEADLINE_S = 60.0


def make_stage(world: World, model: Path, **settings: Any) -> ActorUpdate:
    # With old_logprobs="rollout" the loss depends on the weights.
    settings |= {"lr": 1e-3, "old_logprobs": "rollout", "max_mismatch": None}
    stage = ActorUpdate(ActorUpdate.Config(model=str(model), groups_per_step=2, **settings))
    stage.setup(world)
    return stage


def state(step: int) -> RunState:
    return RunState(step=step, version=step, ledger={}, data="", graph="", settings={}, packages={})


def save(stage: ActorUpdate, checkpoints: Checkpoints, step: int) -> None:
    """As a run does it."""
    writing = checkpoints.begin(step)
    try:
        stage.save(writing)
        stage.finish_save()
        checkpoints.publish(writing, state(step))
    except (OSError, CheckpointError):
        checkpoints.discard(writing)
        raise


# Kills --------------------------------------------------------------------------------------------------------------


def live(tell: Any, model: Path, steps: list[list[pa.RecordBatch]], root: Path) -> None:
    """One life of a run that saves every step: goes on from the newest checkpoint to the last of `steps`. Each is
    published after the next has trained."""
    try:
        stage = make_stage(World(rank=0, size=1, threads=1), model)
        checkpoints = Checkpoints(root, keep_last=1)
        if found := checkpoints.latest():
            stage.load(found.folder)
        writing: Path | None = None
        for step in range(found.state.step + 1 if found else 1, len(steps) + 1):
            tell.send(("trained", step, stage.update(steps[step - 1])["actor/loss"]))
            if writing:
                publish(tell, stage, checkpoints, writing, step - 1)
            tell.send(("saving", step, time.monotonic()))
            writing = checkpoints.begin(step)
            stage.save(writing)
            tell.send(("begun", step, time.monotonic()))
        if writing:
            publish(tell, stage, checkpoints, writing, len(steps))
    except BaseException:  # noqa: BLE001 - the error goes to the test
        tell.send(("failed", 0, traceback.format_exc()))


def publish(tell: Any, stage: ActorUpdate, checkpoints: Checkpoints, writing: Path, step: int) -> None:
    stage.finish_save()
    tell.send(("written", step, time.monotonic()))
    checkpoints.publish(writing, state(step))
    tell.send(("saved", step, time.monotonic()))


class Kill(NamedTuple):
    """When a life ends: so long after it told `phase` for the `count`-th time."""

    phase: str
    count: int
    after_s: float


def watch(*args: Any, kill: Kill | None = None) -> dict[str, dict[int, Any]]:
    """What one life told, by kind and step."""
    context = multiprocessing.get_context("fork")
    ear, mouth = context.Pipe(duplex=False)
    child = context.Process(target=live, args=(mouth, *args), daemon=True)
    child.start()
    mouth.close()  # only the child holds it: its death ends the pipe
    told: dict[str, dict[int, Any]] = {k: {} for k in ("trained", *PHASES, "saved", "failed")}
    with contextlib.suppress(EOFError):
        while ear.poll(DEADLINE_S):
            kind, step, value = ear.recv()
            told[kind][step] = value
            if kill and kill[:2] == (kind, len(told[kind])):
                time.sleep(kill.after_s)
                child.kill()
    child.kill()
    child.join(DEADLINE_S)
    assert not told["failed"], told["failed"][0]
    return told


def make_kills(straight: dict[str, dict[int, Any]]) -> list[Kill]:
    """Spread over the time that a save takes: as many while the stage copies, while it writes and trains, and while
    what it wrote is published. The writing is over before the next step: more of its kills come early."""

    def usual_s(begin: str, end: str) -> float:
        return statistics.median(straight[end][step] - straight[begin][step] for step in straight[end])

    rng = random.Random(5)
    num = NUM_KILLS // len(PHASES)
    parts = [((part + rng.random()) / num) ** 2 for part in range(num)]
    kills = [
        Kill(begin, rng.randint(1, MAX_SAVES), part * usual_s(begin, end))
        for begin, end in PHASES.items()
        for part in parts
    ]
    rng.shuffle(kills)
    return kills


def test_a_run_killed_again_and_again_while_it_saves_gives_the_same_losses(
    tiny: Any, make_groups: Any, tmp_path: Path
) -> None:
    steps = [make_groups(num_groups=2, seed=seed) for seed in range(NUM_KILLS * MAX_SAVES + 1)]
    straight = watch(tiny("qwen3"), steps, tmp_path / "straight")
    losses: dict[int, Any] = {}
    published = 0
    for kill in [*make_kills(straight), None]:
        told = watch(tiny("qwen3"), steps, tmp_path / "killed", kill=kill)
        assert told["trained"].items() <= straight["trained"].items()
        losses |= told["trained"]
        found = Checkpoints(tmp_path / "killed").latest()
        assert not found or not found.passed_over
        assert max([published, *told["saved"]]) <= (found.state.step if found else 0) <= max(losses)
        published = found.state.step if found else 0
    assert losses == straight["trained"]
    assert list(losses) == list(range(1, len(steps) + 1))


# Full disks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=30)


def fill(disk: Path, *, room_bytes: int) -> Path:
    """Leaves so much room on the disk; removing the file that this gives makes room again."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(bytes(free - room_bytes))
    return ballast


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_a_full_disk_leaves_the_last_checkpoint_and_a_later_save_works(
    launch: Any, tiny: Any, make_groups: Any, small_disk: Path
) -> None:
    def run(world: World) -> list[str]:
        errors: list[str] = []
        checkpoints = Checkpoints(small_disk / "checkpoints", keep_last=1)
        stage = make_stage(world, tiny("llama"))
        stage.update(make_groups(num_groups=2))
        save(stage, checkpoints, 1)
        state_bytes = (checkpoints.latest().folder / "state.json").stat().st_blocks * 512
        whole_bytes = used_bytes(checkpoints.latest().folder)
        for room_bytes in (0, 4096, whole_bytes // 2, whole_bytes - state_bytes - 4096, whole_bytes - state_bytes):
            ballast = fill(small_disk, room_bytes=room_bytes)
            with pytest.raises((OSError, CheckpointError)) as caught:
                save(stage, checkpoints, 2)
            errors.append(f"{type(caught.value).__name__}: {caught.value}")
            assert [p.name for p in checkpoints.root.iterdir()] == ["step_000001"]
            stage.load(checkpoints.latest().folder)
            ballast.unlink()
        save(stage, checkpoints, 2)
        stage.load(checkpoints.latest().folder)
        assert checkpoints.latest().state.step == 2
        return errors

    (errors,) = launch(1, run)
    assert [error.split(":")[0] for error in errors] == ["CheckpointError"] * 4 + ["OSError"]
    assert all("No space left on device" in error or "(0.0 MiB free)" in error for error in errors)


@contextlib.contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def no_last_file() -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise OSError("no room for the last file")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "save_config", refuse)
        yield


FAILURES = {
    "the first file": lambda: no_file_above(100),
    "the tensors": lambda: no_file_above(20_000),
    "the last file": no_last_file,
}


@pytest.mark.parametrize(
    ("rank", "failure"), [(0, "the first file"), (0, "the tensors"), (1, "the tensors"), (0, "the last file")]
)
def test_a_rank_that_can_not_write_fails_on_all(
    launch: Any, tiny: Any, make_groups: Any, tmp_path: Path, rank: int, failure: str
) -> None:
    def run(world: World) -> tuple[str, float, float]:
        stage = make_stage(world, tiny("llama"), layout=Layout(tp=2))
        stage.update(make_groups(num_groups=2))
        breaking = FAILURES[failure]() if world.rank == rank else contextlib.nullcontext()
        with breaking:
            stage.save(tmp_path / "failed")
            with pytest.raises(CheckpointError) as caught:
                stage.finish_save()
        stage.save(tmp_path / "later")
        straight = stage.update(make_groups(num_groups=2, seed=9)).get("actor/loss", 0.0)
        stage.load(tmp_path / "later")
        return str(caught.value), straight, stage.update(make_groups(num_groups=2, seed=9)).get("actor/loss", 0.0)

    told = launch(2, run)
    for error, _, _ in told:
        assert error.startswith(f"the policy can't be saved to {tmp_path / 'failed'} (")
        assert f" MiB free):\n  rank {rank}: OSError: " in error
        assert f"rank {1 - rank}" not in error
    assert [straight for _, straight, _ in told] == [resumed for _, _, resumed in told]


def test_a_rank_that_does_not_see_the_folder_fails_on_all(launch: Any, tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def run(world: World) -> str:
        stage = make_stage(world, tiny("llama"), layout=Layout(tp=2))
        stage.save(tmp_path / ("file/1" if world.rank else "0"))
        with pytest.raises(CheckpointError, match="rank 1: NotADirectoryError") as caught:
            stage.finish_save()
        return str(caught.value)

    assert all("rank 0" not in error for error in launch(2, run))
