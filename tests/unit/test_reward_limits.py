"""A reward function that blocks, dies or leaves things behind never stops the stage."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollstream.stages.errors import PluginError
from rollstream.stages.reward import Reward


def loop_for_ever(response):
    while response == "bad":
        pass
    return 1.0


async def loop_for_ever_in_a_coroutine(response):
    await asyncio.sleep(0)
    while response == "bad":
        pass
    return 1.0


def backtrack(response):
    return float(re.fullmatch(r"(a|aa)+b", "a" * 100_000 if response == "bad" else "ab") is not None)


def hold_the_interpreter_lock(response):
    if response == "bad":
        ctypes.PyDLL(None).pause()
    return 1.0


def lock_up_on_a_power_tower(response):
    return float(9 ** (9**9) > 0) if response == "bad" else 1.0


@pytest.mark.parametrize(
    "function",
    [loop_for_ever, loop_for_ever_in_a_coroutine, backtrack, hold_the_interpreter_lock, lock_up_on_a_power_tower],
)
def test_a_stuck_sample_gets_the_timeout_score_and_the_others_theirs(score, function):
    rewards, stage = score(function, ["good", "bad", "good"], timeout_s=0.4, timeout_score=-0.5)
    assert rewards == [1.0, -0.5, 1.0]
    assert stage.metrics.sums["reward/timed_out"] == (1.0, 3.0)


def test_a_timeout_score_of_none_leaves_no_reward(score):
    rewards, stage = score(loop_for_ever, ["bad", "good"], timeout_s=0.3, timeout_score=None)
    assert rewards == [None, 1.0]
    assert stage.metrics.sums["reward/mean"] == (1.0, 1.0)


def test_an_async_sample_that_overruns_is_cancelled_without_a_restart(score):
    async def wait(response):
        await asyncio.sleep(60 if response == "bad" else 0)
        return float(os.getpid())

    rewards, stage = score(wait, ["good", "bad", "good"], timeout_s=0.3)
    assert rewards[1] == 0.0
    assert rewards[0] == rewards[2] == stage._open().start().popen.pid


def test_start_up_does_not_count_against_the_first_sample(score, tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "slow_to_import.py").write_text(
        "import os, time\nif 'slow' in os.environ: time.sleep(0.6)\ndef f(response): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    import slow_to_import  # type: ignore[import-not-found]

    monkeypatch.setenv("slow", "1")
    assert score(slow_to_import.f, ["a"], timeout_s=0.3)[0] == [1.0]


def state_of(pid: int) -> str:
    """One letter as in `ps`; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while state_of(pid) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    return state_of(pid) in ("", "Z")


def test_a_stuck_sample_leaves_no_process_behind(score, tmp_path):
    pids = tmp_path / "pids"

    def spawn(response):
        sleeper = subprocess.Popen(["sleep", "300"])
        pids.write_text(f"{os.getpid()} {sleeper.pid}")
        sleeper.wait()

    score(spawn, ["bad"], timeout_s=0.4)
    worker, grandchild = map(int, pids.read_text().split())
    assert state_of(worker) == ""  # gone, not a zombie: it was waited for
    assert has_ended(grandchild)


def test_file_descriptors_stay_flat_over_restarts(score, rollouts):
    _, stage = score(loop_for_ever, ["good"], timeout_s=0.2)
    before = len(os.listdir("/proc/self/fd"))
    stage.process(rollouts(["good"] * 200 + ["bad", "bad"] + ["good"]))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_function_that_ends_its_process_is_an_error(score):
    def leave(response):
        os._exit(3)

    with pytest.raises(PluginError, match="ended itself with exit status 3") as caught:
        score(leave, ["a"])
    assert caught.value.subject == "sample r000001.e0.0"


def test_after_a_crash_the_next_sample_is_scored(score):
    def crash(response):
        if response == "bad":
            os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    rewards, stage = score(crash, ["good", "bad", "good"], on_error="abstain")
    assert rewards == [1.0, None, 1.0]
    assert "ended by SIGSEGV" in stage.first_error


def test_prints_of_the_function_do_not_disturb(score):
    def chatty(response):
        sys.stdout.write("x" * 100_000)
        os.write(1, b"raw")
        subprocess.run(["echo", "from a child"], check=True)
        return 1.0

    assert score(chatty, ["a", "b"])[0] == [1.0, 1.0]


def test_works_in_a_thread_that_ends(score, rollouts):
    """The worker outlives the thread that started it, and signals work in the function."""

    def alarm(response):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return float(os.getpid())

    found = []
    thread = threading.Thread(target=lambda: found.append(score(alarm, ["a"])))
    thread.start()
    thread.join(30)
    (rewards, stage) = found[0]
    assert stage.process(rollouts(["a"]))["reward"].to_pylist() == rewards


DRIVER = """
import ctypes, os, sys, time
import pyarrow as pa
from rollstream.stages.reward import Reward
def f(response):
    ctypes.PyDLL(None).pause()
stage = Reward(Reward.Config(function=f, timeout_s=300))
stage.setup(None)
print(stage._open().start().popen.pid, flush=True)
stage.process(pa.RecordBatch.from_pydict({"sample_id": ["a"], "response": ["b"]}))
"""


def test_the_worker_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        time.sleep(0.2)
        assert state_of(worker) not in ("", "Z")
        driver.kill()
    assert has_ended(worker)


def test_close_ends_the_worker(score):
    def pid(response):
        return float(os.getpid())

    rewards, stage = score(pid, ["a"])
    stage.close()
    assert state_of(int(rewards[0])) == ""


def test_a_dropped_stage_ends_its_worker(rollouts):
    stage = Reward(Reward.Config(function=lambda response: float(os.getpid())))
    pid = int(stage.process(rollouts(["a"]))["reward"][0].as_py())
    del stage
    assert state_of(pid) == ""
