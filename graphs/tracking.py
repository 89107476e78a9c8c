"""The MLflow record of one run: settings, metrics by step, tables of samples, texts.

    start -> log, samples, text ... -> finish          a resumed run starts again under its run id

One process writes a run: the tracker, in an actor of its own; stages send it their numbers. It names its run in every
call and never uses MLflow's active run, so that several runs may be recorded from one process. Every value carries its
step. After a resume from step k, steps past k are recorded again: MLflow keeps both values of such a step and the later
timestamp is the one that counts; the tag `rollstream.resumed_at` lists every k.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rollstream.graphs.metric_names import decode, encode
from rollstream.graphs.settings import flatten, plain, redact_text
from rollstream.stages.errors import ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: Longest parameter that every MLflow server in use takes; the whole is in settings.json.
MAX_PARAM_CHARS = 500
#: Longest tag that every MLflow server in use takes.
MAX_TAG_CHARS = 5000
#: Tables that MLflow's page lists, the newest ones: their list is a tag and must fit in it. Older ones stay as files.
MAX_TABLES_LISTED = 80
CUT_MARK = " ... [cut]"
#: How many values of a step were no finite numbers and went to tags `metric.<name>`; absent when none.
NOT_LOGGED = "tracking/not_logged"
SAMPLE_COLUMNS = ("sample_id", "prompt", "response", "target", "reward", "finish_reason")

#: Keeps MLflow's own messages off the user's terminal, its telemetry off, and waits for a server short. What the user
#: has set stays.
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}


def default_uri(root: Path) -> str:
    """The tracking URI of a database in the folder `root`, absolute."""
    return f"sqlite:///{root.absolute()}/mlflow.db"


def local_root(uri: str) -> Path | None:
    """The folder of a local database, which holds its artifacts too; None where a server decides.

    Raises ConfigError for a path relative to the working directory, which differs from process to process.
    """
    if uri.startswith("sqlite:"):
        database = Path(uri.partition("?")[0].partition(":///")[2])
        if not database.is_absolute():
            way_out = f"sqlite:///{database.absolute()}"
            raise ConfigError(f"the tracking URI must hold an absolute path, got {uri!r}: write {way_out!r}")
        return database.parent
    if "://" not in uri:
        way_out = default_uri(Path(uri))
        raise ConfigError(
            f"the tracking URI must have a scheme, such as sqlite or https, got {uri!r}: write {way_out!r}"
        )
    return None


class Tracker:
    """Records one run in MLflow at `uri`, under `experiment`, which is created where it is not there."""

    def __init__(self, uri: str, experiment: str):
        self.uri = uri
        self.experiment = experiment
        self.run_id = ""
        self._root = local_root(uri)
        self._connection: MlflowClient | None = None

    def start(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        run_id: str | None = None,
        done_steps: int = 0,
    ) -> str:
        """Starts a run, or goes on with run `run_id` after `done_steps` steps; returns the run's id, to be kept in the
        checkpoint.

        Every setting becomes a parameter ("rollout.temperature"), cut where it is long; all of them, whole, are in
        the artifact settings.json, those of a resume in settings_from_<step>.json. A parameter never changes: what a
        resume changed is in the tag `rollstream.changed_at_<step>`. Secrets are redacted everywhere.

        Raises ConfigError when `run_id` is not to be found.
        """
        settings = cast("dict[str, Any]", plain(params))
        logged: dict[str, str] = {}
        for key, value in flatten(settings):
            logged.setdefault(encode(key), _cut(value, MAX_PARAM_CHARS))
        run_tags = {encode(k): _cut(redact_text(str(v)), MAX_TAG_CHARS) for k, v in (tags or {}).items()}
        if run_id is None:
            run = self._client.create_run(self._experiment_id(), run_name=name)
            self.run_id, file = run.info.run_id, "settings.json"
        else:
            logged, resume_tags = self._resume(run_id, logged, done_steps)
            run_tags.update(resume_tags)
            file = f"settings_from_{done_steps:06d}.json"
        self._write(params=logged, tags=run_tags)
        self._client.log_text(self.run_id, json.dumps(settings, indent=2), file)
        return self.run_id

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Records the metrics of a step; nested ones as "outer/inner", names encoded (`metric_names`).

        What is no finite number goes to the tag `metric.<name>` with its step and is counted in `tracking/not_logged`;
        no value raises. A name too long for MLflow is kept whole in the tag `rollstream.name.<its hash>`.
        """
        numbers: dict[str, float] = {}
        tags: dict[str, str] = {}
        not_logged = 0
        for name, value in _flat_metrics(metrics):
            number = _finite(value)
            key = encode(name)
            if decode(key) != name:
                tags[f"rollstream.name.{key[-17:-1]}"] = _cut(name, MAX_TAG_CHARS)
            if number is not None and key not in numbers and key != NOT_LOGGED:
                numbers[key] = number
            else:
                not_logged += 1
                tags[encode(f"metric.{name}")] = _cut(redact_text(f"step {step}: {_shown(value)}"), MAX_TAG_CHARS)
        if not_logged:
            numbers[NOT_LOGGED] = float(not_logged)
        self._write(step=step, metrics=numbers, tags=tags)

    def text(self, artifact_file: str, text: str) -> None:
        """Keeps a text as an artifact, secrets redacted."""
        self._client.log_text(self.run_id, _storable(redact_text(text)), artifact_file)

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Keeps rows of `SAMPLE_COLUMNS` and whatever else they hold as the table samples/step_<step>.json; a table of
        the same step is replaced. What a row lacks is null."""
        columns = list(dict.fromkeys([*SAMPLE_COLUMNS, *(name for row in rows for name in row)]))
        data = [[_cell(row.get(name)) for name in columns] for row in rows]
        file = f"samples/step_{step:06d}.json"
        table = json.dumps({"columns": columns, "data": data})
        self._client.log_text(self.run_id, table, file)
        tag = "mlflow.loggedArtifacts"  # MLflow's page shows as tables what this tag lists
        listed: list[dict[str, str]] = json.loads(self._client.get_run(self.run_id).data.tags.get(tag, "[]"))
        listed = [t for t in listed if t["path"] != file] + [{"path": file, "type": "table"}]
        self._client.set_tag(self.run_id, tag, json.dumps(listed[-MAX_TABLES_LISTED:]))

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Marks the run as ended."""
        self._client.set_terminated(self.run_id, status)

    @property
    def _client(self) -> MlflowClient:
        if self._connection is None:
            for name, value in _MLFLOW_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            from mlflow import MlflowClient

            if self._root:
                self._root.mkdir(parents=True, exist_ok=True)
            self._connection = MlflowClient(tracking_uri=self.uri)
        return self._connection

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            artifacts = (self._root / "mlartifacts").as_uri() if self._root else None
            try:
                return self._client.create_experiment(self.experiment, artifact_location=artifacts)
            except MlflowException:  # another run may have created it just now
                found = self._client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"experiment {self.experiment!r} is deleted: run `mlflow experiments restore --experiment-id "
                f"{found.experiment_id}`, or choose another name"
            )
        return str(found.experiment_id)

    def resumed(self, done_steps: int) -> None:
        """The run went back to where `done_steps` steps were done: later ones come again."""
        tags = self._client.get_run(self.run_id).data.tags
        self._write(tags=_resumed_tag(tags, done_steps))

    def _resume(self, run_id: str, params: dict[str, str], done_steps: int) -> tuple[dict[str, str], dict[str, str]]:
        """Opens the run again; its new parameters, and the tags that tell of the resume."""
        from mlflow.exceptions import MlflowException

        try:
            data = self._client.get_run(run_id).data
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(
                f"run {run_id!r} cannot be resumed at {redact_text(self.uri)}: {redact_text(str(error))}. Resume with "
                "the tracking URI that the checkpoint was written under."
            ) from error
        self.run_id = run_id
        tags = _resumed_tag(data.tags, done_steps)
        changed = [f"{k}: {data.params[k]} -> {v}" for k, v in params.items() if data.params.get(k, v) != v]
        if changed:
            tags[f"rollstream.changed_at_{done_steps}"] = _cut("\n".join(changed), MAX_TAG_CHARS)
        return {k: v for k, v in params.items() if k not in data.params}, tags

    def _write(
        self,
        *,
        step: int = 0,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self.run_id,
            metrics=[Metric(k, v, now_ms, step) for k, v in (metrics or {}).items()],
            params=[Param(k, v) for k, v in (params or {}).items()],
            tags=[RunTag(k, v) for k, v in (tags or {}).items()],
        )


def _storable(text: str) -> str:
    """The text without what files and databases refuse: lone surrogates, which broken output may hold, and NUL."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "?")


def _cut(text: str, max_chars: int) -> str:
    text = _storable(text)
    return text if len(text) <= max_chars else text[: max_chars - len(CUT_MARK)] + CUT_MARK


def _flat_metrics(metrics: Mapping[Any, object], head: str = "") -> Iterator[tuple[str, object]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat_metrics(cast("Mapping[Any, object]", value), f"{head}{name}/")
        else:
            yield f"{head}{name}", value


def _finite(value: object) -> float | None:
    """The value as a finite number, or None: a text is none, nor is an array, whatever its size."""
    if isinstance(value, str | bytes) or getattr(value, "ndim", 0):
        return None
    try:
        number = float(cast("float", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    """The value as text; Python refuses to write out integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def _cell(value: object) -> object:
    """The value as a cell of a JSON table, which has no word for numbers that are not finite."""
    if value is None or isinstance(value, str | bool):
        return value
    if (isinstance(value, int) and value.bit_length() < 64) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _shown(value)


def _resumed_tag(tags: Mapping[str, str], done_steps: int) -> dict[str, str]:
    """The tag that lists every step that the run was resumed at, with one more."""
    steps = [*tags.get("rollstream.resumed_at", "").split(), str(done_steps)]
    return {"rollstream.resumed_at": _cut(" ".join(steps), MAX_TAG_CHARS)}
