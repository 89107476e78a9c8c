"""How one run goes: how long, where its files are, what it resumes. Set by `run(...)`; the command line overrides."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollstream.stages.errors import ConfigError
from rollstream.stages.names import known_names

#: The command line's overrides reach a script's `run` through this variable, as a JSON object.
OVERRIDES = "ROLLSTREAM_RUN"
#: Where relative output folders go in a Ray job, whose own folder is deleted with it.
HOME = "ROLLSTREAM_HOME"

Resume = Literal["never", "auto", "must"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of one run that change nothing of what is computed."""

    #: Steps in all, those before a resume included; None: until the prompts end.
    steps: int | None
    #: Folder of checkpoints, the exported model and MLflow's database; None: runs/NAME.
    out: str | Path | None = None
    #: "never" starts afresh, "auto" resumes if there is a checkpoint, "must" refuses to start without one.
    resume: Resume = "never"
    #: A checkpoint after every so many steps, and one at the end; None: none at all, for a run that is only tried out.
    save_every: int | None = 50
    #: Checkpoints that stay.
    keep_last: int = 2
    #: Checkpoints of every so many steps stay for ever.
    keep_every: int | None = None
    #: MLflow tracking URI; None: an SQLite file in the folder above `out`.
    tracking_uri: str | None = None
    #: A table of sample rollouts goes to MLflow every so many steps.
    samples_every: int = 10
    #: Nothing moved for so long: the run stops and says what it was waiting for.
    stall_s: float = 1800.0
    #: How often the processes of one stage may die without a finished step in between.
    max_restarts: int = 5
    #: A group that a process had when it died, so often, is set aside with its rows.
    max_deaths: int = 2
    #: Stages whose output is recorded, each in recorded/STAGE.arrows.
    record: tuple[str, ...] = ()
    #: Recordings that take the place of the stages that made them, and of all stages that only these need.
    replay: tuple[str | Path, ...] = ()
    #: The last stage that runs; nothing is trained.
    until: str | None = None
    #: Export the model for transformers at the end.
    export: bool = True
    #: Check everything, print the graph and the placement, and start nothing.
    dry_run: bool = False

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, got {value}"
            for name in ("steps", "save_every", "keep_last", "keep_every", "samples_every", "max_deaths")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.max_restarts < 0:
            faults.append(f"max_restarts must be 0 or more, got {self.max_restarts}")
        if self.stall_s <= 0:
            faults.append(f"stall_s must be above 0, got {self.stall_s}")
        for name in ("record", "replay"):
            given: object = getattr(self, name)
            if isinstance(given, str | Path):
                faults.append(f"{name} must be a tuple, got {given!r}: write ({str(given)!r},)")
            else:
                object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON knows lists only
        if self.resume not in ("never", "auto", "must"):
            faults.append(f"resume must be 'never', 'auto' or 'must', got {self.resume!r}")
        if faults:
            raise ConfigError(faults)

    @classmethod
    def of(cls, **given: Any) -> RunOptions:
        """From names and values. Raises ConfigError for a name that is none, with those that it may have meant."""
        names = [f.name for f in dataclasses.fields(cls)]
        if wrong := [name for name in given if name not in names]:
            raise ConfigError([f"run has no option {name!r}: {known_names(name, names)}" for name in wrong])
        return cls(**given)

    def overridden(self, environment: Mapping[str, str]) -> RunOptions:
        """With the command line's overrides, if there are any."""
        try:
            given: dict[str, Any] = json.loads(environment.get(OVERRIDES, "{}"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{OVERRIDES} must hold a JSON object: {error}") from None
        return RunOptions.of(**vars(self) | given)

    def folder(self, graph: str) -> Path:
        """The run's folder, absolute. In a Ray job a relative one is taken from $ROLLSTREAM_HOME (~/rollstream), for
        the job's own folder is a copy that Ray deletes."""
        out = Path(self.out or Path("runs") / graph).expanduser()
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        base = Path(os.environ.get(HOME, "~/rollstream")).expanduser() if in_job else Path.cwd()
        return (base / out).absolute()
