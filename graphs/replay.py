"""A source that gives the groups of a recording, in the place of the stage that made them.

    rollout.arrows (orders 0, 1, 3)                           -> ReplaySource "rollout" -> groups of orders 0, 1, 2
    advantage.arrows (0, 3), ref_logprob.arrows (0, 1, 3)     -> ReplaySource "advantage+ref_logprob" -> 0, 1

A recording may have holes, where groups were filtered, and begin above 0, where a resumed run made it. A run's orders
have neither, so the groups are numbered anew; their ids and their rows stay. Of several recordings of one run, those
groups are given that all of them hold, of the same sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollstream.graphs.recording import read
from rollstream.stages.base import Metric, Source, Stage
from rollstream.stages.schema import Schema, join_columns

_Record = tuple[Mapping[str, Any], pa.RecordBatch]


class ReplaySource(Source[Schema]):
    """Gives recorded groups, with the metrics that the recorded stages made of them.

    `schemas` are those of the stages that the recordings were made behind, file by file: all their columns must be
    there. Where there are several files, they must be of one run.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Stage.Config):
        """Which recordings."""

        #: Files, absolute. Called as other sources call theirs: a moved recording is the same data.
        path: tuple[str, ...]

    config: Config

    def __init__(self, config: Config, *, name: str, schemas: Sequence[type[Schema]]):
        super().__init__(config, name=name)
        self._schemas = tuple(schemas)

    @cached_property
    def births(self) -> tuple[str, ...]:
        """The samplings that all files hold, in the order of the run. Read once, on the driver: a recording that still
        grows gives no more than it had then."""
        first, *others = ([head["birth"] for head, _ in read(Path(path))] for path in self.config.path)
        common = set(first).intersection(*others)
        return tuple(birth for birth in first if birth in common)

    def faults(self) -> list[str]:
        files = zip(self.config.path, self._schemas, strict=True)
        faults = [fault for path, schema in files for fault in _column_faults(path, schema)]
        if not faults and not self.births:
            faults.append(f"{' and '.join(self.config.path)} have no group in common: all must be recorded in one run")
        return faults

    def rows(self, skip: frozenset[int], start: int) -> Iterator[pa.RecordBatch]:
        positions = {birth: position for position, birth in enumerate(self.births)}
        files = [(r for r in read(Path(path)) if r[0]["birth"] in positions) for path in self.config.path]
        for records in zip(*files, strict=True):
            position = positions[records[0][0]["birth"]]
            if position >= start and position not in skip:
                yield self._group(records, position)

    def fingerprint(self) -> str:
        """Of which samplings they are, and of the columns: a birth names a group's rows for good."""
        columns = [sorted(schema.columns) for schema in self._schemas]
        return hashlib.sha256(repr((columns, self.births)).encode()).hexdigest()

    def _group(self, records: Sequence[_Record], position: int) -> pa.RecordBatch:
        metrics: dict[str, Metric] = {}
        for head, _ in records:
            metrics |= head["metrics"]
        self.metrics.merge(metrics)
        group = join_columns([batch for _, batch in records])
        order = pa.array([position] * group.num_rows, pa.int64())
        return group.set_column(group.schema.get_field_index("order"), "order", order)


def _column_faults(path: str, schema: type[Schema]) -> Iterator[str]:
    _, group = next(read(Path(path)))
    found = dict(zip(group.schema.names, group.schema.types, strict=True))
    for name, wanted in schema.columns.items():
        if name not in found:
            yield f"{path} has no column {name!r} ({wanted}), which {schema.__name__} has: record it again"
        elif found[name] != wanted:
            yield f"{path}: column {name!r} must be {wanted}, got {found[name]}: record it again"
