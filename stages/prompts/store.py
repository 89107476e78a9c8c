"""Rows on disk, so that memory does not grow with the data: eight bytes a row stay in memory.

One pass over the data writes each good row as a line of JSON to an unnamed temporary file; the bad ones become faults.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.stages.errors import DataError
from rollstream.stages.names import known_names
from rollstream.stages.prompts.files import Row, read_rows
from rollstream.stages.prompts.plain import to_json, without_null_fields
from rollstream.stages.prompts.render import prompt_fault


class Record(NamedTuple):
    """A row as it is used."""

    number: int  # of the row in the data, from 1
    label: str  # how messages name it
    prompt: Any  # text or a list of chat messages
    target: str  # JSON text of the answer
    meta: str  # JSON object of the further columns


class RowStore:
    """All good rows of `path`, by index from 0 in the order of the data. `faults` has a sentence for each bad row.

    Raises DataError if the file or a column is wrong.
    """

    def __init__(self, path: Path, *, prompt: str, answer: str, chat_template: bool):
        self.prompt, self.answer, self.chat_template = prompt, answer, chat_template
        self.faults: list[str] = []
        self.rows_read = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the store
        self._starts = array("q")
        self._seen: Counter[str] = Counter()
        digest = hashlib.sha256()
        for row in read_rows(path):
            self.rows_read += 1
            if row.columns is not None:
                self._check_columns(row.columns, str(path))
            record = self._record(row)
            if record is not None:
                line = json.dumps(record).encode() + b"\n"
                digest.update(line)
                self._starts.append(self._file.tell())
                self._file.write(line)
        if not self.rows_read:
            raise DataError(f"prompt file {str(path)!r} holds no row")
        if self._seen:
            self._check_columns(tuple(self._seen), str(path))
        #: Of the rows as they are used; the same data give the same digest on any machine.
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:
        self._file.seek(self._starts[index])
        return Record(*json.loads(self._file.readline()))

    def close(self) -> None:
        self._file.close()

    def _check_columns(self, columns: tuple[str, ...], path: str) -> None:
        faults = [
            f"{path!r} has no {role} column {name!r}: {known_names(name, columns)}. Set Prompts.Config({role}=...)"
            for role, name in (("prompt", self.prompt), ("answer", self.answer))
            if name not in columns
        ]
        if faults:
            raise DataError(faults)

    def _record(self, row: Row) -> Record | None:
        if row.values is None:
            return self._fault(row, row.fault)
        if row.columns is None:
            self._seen.update(row.values.keys())
        lacking = [name for name in (self.prompt, self.answer) if name not in row.values]
        if lacking:
            return self._fault(row, f"has no {' and no '.join(map(repr, lacking))}")
        prompt = row.values[self.prompt]
        if row.columns is not None:
            prompt = without_null_fields(prompt)
        if fault := prompt_fault(prompt, chat_template=self.chat_template):
            return self._fault(row, f"{self.prompt!r} {fault}")
        texts: dict[str, str] = {}
        for name, value in row.values.items():
            try:
                texts[name] = to_json(value)
            except (TypeError, ValueError) as error:
                return self._fault(row, f"{name!r}: {error}")
        further = [f"{json.dumps(n)}: {t}" for n, t in texts.items() if n not in (self.prompt, self.answer)]
        return Record(row.number, row.label, prompt, texts[self.answer], "{" + ", ".join(further) + "}")

    def _fault(self, row: Row, what: str) -> None:
        self.faults.append(f"{row.label} {what}")
