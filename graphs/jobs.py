"""Scripts as Ray jobs: the script's folder goes along, without what is large and not needed."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.graphs.options import OVERRIDES

#: Ray kills a stopped job after 3 s unless told otherwise; a checkpoint takes longer.
STOP_WAIT_S = 60
#: What never belongs into a job's package.
EXCLUDES = ("/.git", "/.venv", "runs", "__pycache__", "*.safetensors", "*.gguf", "mlflow.db", "mlartifacts")


def submit_job(address: str, script: Path, args: Sequence[str], given: Mapping[str, Any]) -> str:
    """Submits `script` with its arguments; the job's id. `given` overrides RunOptions there."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)
    return client.submit_job(
        entrypoint=shlex.join(["python", script.name, *args]),
        runtime_env={
            "working_dir": str(script.resolve().parent),
            "excludes": list(EXCLUDES),
            "env_vars": {OVERRIDES: json.dumps(dict(given)), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
        },
    )


def follow_job(address: str, job: str) -> int:
    """Prints the job's log as it comes; 0 where the job succeeded, else 1."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(address)

    async def tail() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)  # noqa: T201

    asyncio.run(tail())
    status = client.get_job_status(job)
    print(f"job {job}: {status}")  # noqa: T201
    return 0 if status == JobStatus.SUCCEEDED else 1
