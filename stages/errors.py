"""Every error that rollstream raises, on one page.

    RollstreamError
      ConfigError (ValueError)    a setting is wrong                     driver, while a stage or graph is built
        WiringError               a stage is wired to the wrong stream   driver, while a graph is built
        DataError                 a data file, column or row is wrong    driver, at `Graph.check`
        PlacementError            what was asked for can never be had    driver, before any actor starts
      CheckpointError             a checkpoint is torn, foreign or absent  driver, at resume
      StageError (RuntimeError)   a stage raised while running; names stage and sample, holds the traceback
        PluginError               a reward or rollout function raised; names the sample
        ProcessDied               a stage's process died more often than it may
      EngineDied                  the process behind a rollout engine is gone; its stage's process is started again
      StalledError                nothing moved for the stall limit; names the stage, the group and its age

`ConfigError` and its kin list every fault found, not only the first. What raises ends the run: the original error comes
first and nothing is retried. What dies is started again and its groups are given out again; a group that takes its
process down twice is set aside (`RunOptions.max_restarts`, `max_deaths`). A reward that runs out of time is not an
error but data: the sample gets the time-out score and is counted (`reward/timed_out`). A checkpoint that can't be
written is told of, and the run goes on; only the last one must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class RollstreamError(Exception):
    """Root of all errors that rollstream raises on purpose."""


class ConfigError(RollstreamError, ValueError):
    """One or more settings break a rule.

    >>> str(ConfigError(["n must be at least 1, got 0"]))
    'n must be at least 1, got 0'
    """

    def __init__(self, faults: Sequence[str] | str):
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        head = "" if len(self.faults) == 1 else f"{len(self.faults)} faults:\n  - "
        super().__init__(head + "\n  - ".join(self.faults))

    def __reduce__(self):
        return type(self), (self.faults,)


def check_rules(rules: Iterable[tuple[bool, str]]) -> None:
    """Raises ConfigError with the messages of all rules that do not hold.

    >>> check_rules([(1 > 0, "never told"), (0 > 1, "n must be at least 1, got 0")])
    Traceback (most recent call last):
    rollstream.stages.errors.ConfigError: n must be at least 1, got 0
    """
    if faults := [message for holds, message in rules if not holds]:
        raise ConfigError(faults)


class WiringError(ConfigError):
    """A stage does not fit the stream it was wired to, or the graph has a hole."""


class DataError(ConfigError):
    """A data file, a column or a row is wrong; rows are named by number, counted from 1."""


class PlacementError(ConfigError):
    """The placement asks for resources that the cluster does not have."""


class CheckpointError(RollstreamError):
    """A checkpoint is incomplete, belongs to another run, or is not there."""


class StageError(RollstreamError, RuntimeError):
    """A stage raised.

    `stage` names it, `subject` says what it was working on (a sample or group id, or ""), `cause` is the text of the
    first traceback.
    """

    def __init__(self, stage: str, subject: str, cause: str):
        self.stage, self.subject, self.cause = stage, subject, cause
        super().__init__(f"stage {stage!r} failed" + (f" on {subject}" if subject else "") + f":\n{cause.rstrip()}")

    def __reduce__(self):
        return type(self), (self.stage, self.subject, self.cause)


class PluginError(StageError):
    """A reward or rollout function raised, or ran out of time; `subject` names the sample."""


class ProcessDied(StageError):
    """A process died, and was not started again or died too often; `subject` is empty."""


class EngineDied(RollstreamError):
    """A rollout engine's own process is gone or does not answer: nothing that it was given will come back."""


class StalledError(RollstreamError):
    """No group moved for longer than the stall limit."""
