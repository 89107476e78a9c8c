"""The example, unchanged, by `python`, by `rollstream run`, and as a Ray job on a real cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.py"
BIN = Path(sys.executable).parent
#: Ray's clusters ask for a token; its clients send theirs only when told to.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token"}


def test_by_python_and_by_rollstream_run(script, python, tiny_chat_model, sums, tmp_path):
    one, errors = script(python, EXAMPLE, tiny_chat_model, sums, "2").communicate(timeout=150)
    assert [line.split()[0] for line in one.splitlines()] == ["1", "2"], errors
    other = script(BIN / "rollstream", "run", "--out", "other", "--steps", "1", EXAMPLE, tiny_chat_model, sums, "2")
    two, errors = other.communicate(timeout=150)
    assert two.splitlines() == one.splitlines()[:1], errors
    assert (tmp_path / "runs/arithmetic/model/config.json").exists()
    assert (tmp_path / "other/checkpoints/step_000001").exists()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A real cluster with a dashboard, on ports of its own; its processes end with the test."""
    home = tmp_path_factory.mktemp("r")
    ports = _free_ports(4)
    command = [
        BIN / "ray", "start", "--head", "--block", "--num-cpus=4", f"--temp-dir={home}", f"--port={ports[0]}",
        "--include-dashboard=true", f"--dashboard-port={ports[1]}", f"--dashboard-agent-listen-port={ports[2]}",
        f"--ray-client-server-port={ports[3]}", "--disable-usage-stats",
    ]  # fmt: skip
    log = (home / "start.log").open("w")
    head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True)
    address = f"http://127.0.0.1:{ports[1]}"
    try:
        _wait_for(lambda: _ray("job", "list", "--address", address).returncode == 0, 90)
        yield address, home
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(timeout=60)


def test_as_a_ray_job_submit_follow_status_stop(cluster, tiny_chat_model, sums):
    address, home = cluster
    job = ["--address", address, "--working-dir", str(EXAMPLE.parent)]
    job += ["--runtime-env-json", f'{{"env_vars": {{"ROLLSTREAM_HOME": "{home}/kept"}}}}']
    script = ["--", sys.executable, EXAMPLE.name, str(tiny_chat_model), str(sums)]
    followed = _ray("job", "submit", *job, "--submission-id", "short", *script, "1", timeout=200)
    assert "succeeded" in followed.stdout, followed.stdout + followed.stderr
    assert re.search(r"^1 0\.", followed.stdout, re.MULTILINE)
    assert (home / "kept/runs/arithmetic/model/config.json").exists()
    (home / "kept/runs/arithmetic").rename(home / "kept/runs/done")
    _ray("job", "submit", *job, "--submission-id", "long", "--no-wait", *script, "500")
    _wait_for(lambda: "step 1 " in _ray("job", "logs", "--address", address, "long").stdout, 120)
    assert "RUNNING" in _ray("job", "status", "--address", address, "long").stdout
    stopped = _ray("job", "stop", "--address", address, "long")
    status = _ray("job", "status", "--address", address, "long")
    assert "stopped" in status.stdout, stopped.stdout + status.stdout + status.stderr
    logs = _ray("job", "logs", "--address", address, "long").stdout
    assert "Traceback" not in logs
    # within the few seconds that Ray gives a job by default
    assert list((home / "kept/runs/arithmetic/checkpoints").glob("step_*/state.json")), logs


def _ray(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "ray"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=ENVIRONMENT)


def _wait_for(done, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(1)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
