"""Starting a Ray actor, in one place: what comes back is a handle, which type checkers know nothing of."""

from __future__ import annotations

from typing import Any

import ray


def start(kind: type, *args: Any, num_cpus: float = 0, comes_back: bool = False, **options: Any) -> Any:
    """An actor of class `kind`. Its calls are never retried by Ray: only the graph knows what may be done again.
    With `comes_back` Ray starts its process again when it dies, empty; the flow fills it."""
    restarts = -1 if comes_back else 0
    make: Any = ray.remote(num_cpus=num_cpus, max_restarts=restarts, max_task_retries=0, **options)
    return make(kind).remote(*args)


def end(actor: Any) -> None:
    """Ends an actor at once and for good; one that has ended already is fine."""
    ray.kill(actor)


def restart(actor: Any) -> None:
    """Ends an actor's process at once; Ray starts it again."""
    ray.kill(actor, no_restart=False)
