"""The record of the groups that went through an edge: one file, which grows by a group at a time.

    group, head -> Recorder.add -> edge.arrows: [IPC stream][IPC stream] ... -> read -> (head, group), in order

Each record is an Arrow IPC stream of its own, with one batch: what the file is `about` lies in the schema's metadata,
the head in the batch's, both as JSON. What a dead process left half written at the end is not read, and is cut off
where the file is written on.

    >>> path = Path(tempfile.mkdtemp()) / "rollout.arrows"
    >>> recorder = Recorder(path, {"edge": "rollout"})
    >>> recorder.add({"group_id": "g0", "order": 0}, pa.RecordBatch.from_pydict({"n": [1, 2]})); recorder.close()
    >>> about_of(path), [(head["group_id"], group.num_rows) for head, group in read(path)]
    ({'edge': 'rollout'}, [('g0', 2)])
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollstream.graphs.disk import map_file, stream_of, write_whole
from rollstream.stages.errors import ConfigError, DataError

ABOUT, HEAD = b"rollstream.about", b"rollstream.head"
#: How a message of an Arrow IPC stream begins; its length follows, in 4 bytes.
MARK = b"\xff\xff\xff\xff"
#: How an Arrow IPC stream ends: a message of no length.
END = MARK + bytes(4)


class Recorder:
    """Writes groups to the end of the recording at `path`; a file that is not there is made.

    Raises ConfigError where the file is about something else, and DataError where it is no recording.
    """

    def __init__(self, path: Path, about: Mapping[str, str]):
        self.path = path
        self._about = json.dumps(dict(about))
        contents = _scan(path) if path.exists() else _Contents()
        if contents.places:
            _check_about(path, contents.about, about)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._nbytes = contents.nbytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, self._nbytes)

    def add(self, head: Mapping[str, Any], group: pa.RecordBatch) -> None:
        """Writes a group down. `head` is anything that JSON holds, with the group's position as its `order`; a
        position that was recorded before is replaced.

        Raises OSError where the disk is full: the recording is then as before.
        """
        assert "order" in head, f"a head must have an order, got {dict(head)}"
        labelled = group.replace_schema_metadata({**(group.schema.metadata or {}), ABOUT: self._about})
        pieces = stream_of(labelled, {HEAD.decode(): json.dumps(dict(head))})
        self._nbytes += write_whole(self._fd, pieces, self._nbytes)

    def close(self) -> None:
        os.close(self._fd)


def about_of(path: Path) -> dict[str, str]:
    """What the recording is about, as its Recorder was told. Raises DataError where it is no recording."""
    return _contents(path).about


def read(path: Path) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    """Head and group of each position, in order; of a position that was recorded more than once, the last one. The
    groups are views of the mapped file. Raises DataError, at once, where it is no recording."""
    contents = _contents(path)
    records = (_record_at(path, contents.data, place) for _, place in sorted(contents.places.items()))
    return ((record.head, record.group) for record in records if record)


@dataclass(frozen=True, kw_only=True)
class _Record:
    about: dict[str, str]
    head: dict[str, Any]
    group: pa.RecordBatch
    end: int  # in the file, in bytes


@dataclass(kw_only=True)
class _Contents:
    """A file's whole records."""

    data: Any = b""  # pa.Buffer
    about: dict[str, str] = field(default_factory=lambda: {})
    places: dict[int, int] = field(default_factory=lambda: {})  # position -> where its last record begins, in bytes
    nbytes: int = 0  # of the whole records


def _contents(path: Path) -> _Contents:
    if not path.is_file():
        raise DataError(f"{path} is no recording: there is no such file. {_WAY_OUT}")
    contents = _scan(path)
    if not contents.places:
        raise DataError(f"{path} holds no group: what recorded it ended before the first one was whole. {_WAY_OUT}")
    return contents


def _scan(path: Path) -> _Contents:
    contents = _Contents(data=map_file(path))
    while record := _record_at(path, contents.data, contents.nbytes):
        contents.about = record.about
        contents.places[record.head["order"]] = contents.nbytes
        contents.nbytes = record.end
    return contents


def _record_at(path: Path, data: pa.Buffer, start: int) -> _Record | None:
    """The record that begins at byte `start`; None where the file ends before the record does."""
    rest = data.slice(start)
    if _is_short(path, rest, start):
        return None
    source = pa.BufferReader(rest)
    try:
        reader = pa.ipc.open_stream(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is no recording: byte {start} begins no Arrow schema ({error}). {_WAY_OUT}") from error
    metadata = dict(reader.schema.metadata or {})
    if ABOUT not in metadata:
        raise DataError(f"{path} is no recording: its Arrow schema has no {ABOUT.decode()!r}. {_WAY_OUT}")
    about = json.loads(metadata.pop(ABOUT))
    try:
        group, labels = reader.read_next_batch_with_custom_metadata()
    except (pa.ArrowInvalid, OSError, StopIteration):
        return None
    end = start + source.tell() + len(END)
    if _peek(rest, source.tell()) != END:
        return None
    head = json.loads(labels[HEAD])
    return _Record(about=about, head=head, group=group.replace_schema_metadata(metadata or None), end=end)


def _is_short(path: Path, rest: pa.Buffer, start: int) -> bool:
    """Whether the file ends within the first message, the schema. Raises DataError where no message begins."""
    lead = _peek(rest, 0)
    if lead[:4] != MARK[: len(lead)]:
        raise DataError(f"{path} is no recording: no Arrow stream begins at byte {start}, but {lead!r}. {_WAY_OUT}")
    return len(lead) < 8 or rest.size < 8 + int.from_bytes(lead[4:], "little")


def _peek(data: pa.Buffer, start: int) -> bytes:
    """Eight bytes, or fewer at the end: a message's beginning, or a stream's end."""
    return bytes(memoryview(data)[start : start + 8])


def _check_about(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    faults = [
        f"{path}: it was recorded with {name} {before.get(name)!r}, and {name} is {now.get(name)!r} here: record into "
        "another file, or remove this one"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if faults:
        raise ConfigError(faults)


_WAY_OUT = "`rollstream run --record EDGE` makes one."
