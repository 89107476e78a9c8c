"""Starting a Ray actor, in one place: what comes back is a handle, which type checkers know nothing of."""

from __future__ import annotations

from typing import Any

import ray


def start(kind: type, *args: Any, num_cpus: float = 0, **options: Any) -> Any:
    """An actor of class `kind`. It is never restarted and its calls never retried by Ray: only the graph knows what
    may be done again."""
    make: Any = ray.remote(num_cpus=num_cpus, max_restarts=0, max_task_retries=0, **options)
    return make(kind).remote(*args)


def end(actor: Any) -> None:
    """Ends an actor at once; one that has ended already is fine."""
    ray.kill(actor)
