"""What one edge holds, on disk, so that an edge that is started again goes on with it.

    put   batch -> segment-000003.arrow, then a line -> log.jsonl
    drop  a line -> log.jsonl, then a segment without live records is written over by the next puts
    open  log.jsonl -> the live records -> refill

    folder/log.jsonl              {"boot": "2f..."}
                                  {"put": 7, "head": {...}, "segment": 3, "offset": 0, "length": 296}
                                  {"drop": [7]}
    folder/segment-000003.arrow   records one after another, each an Arrow IPC stream of its own

The log is the truth: bytes of a segment that no live line names mean nothing. Data are written before their line, both
straight to the kernel, and nothing is fsynced: the death of any process loses nothing. A machine that loses power may
have written a line without its data, or new data over old, and neither shows in the file; so a journal counts only
until the machine starts again, and is empty after that. Its groups are made again then; what is trained is decided by
the checkpoint, which is fsynced.

Segments are written over in place and never cut, because memory that the kernel has for a file is filled several times
faster than it is found for a new one.

    >>> journal = Journal(Path(tempfile.mkdtemp()))
    >>> journal.put(0, {"group_id": "g0"}, pa.RecordBatch.from_pydict({"n": [1, 2]}))
    >>> [(head["group_id"], batch.num_rows) for head, batch in journal.refill()]
    [('g0', 2)]
    >>> journal.drop([0]); journal.nbytes
    0
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollstream.graphs.disk import WornFile, map_file, read_batch, stream_of, write_whole
from rollstream.stages.errors import CheckpointError

#: A segment that holds so many takes no more records.
SEGMENT_BYTES = 64 << 20
#: Lines that say nothing about a live record, past which the log is written anew.
MAX_DEAD_LINES = 1000
#: Where Linux says which start of the machine this is.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """Where a live group lies, and its line in the log."""

    segment: int
    offset: int  # in bytes
    length: int  # in bytes
    line: bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass
class _Segment:
    """A file that holds live records or takes the next ones."""

    num_live: int = 0
    end: int = 0  # where the next record goes, in bytes


class Journal:
    """The journal in `folder`, which is made where it is not there. One process opens it, and one thread uses it.

    A record goes to the current segment until that holds `segment_bytes`. Of the segments that are free, the current
    one and `spare_segments` more are kept.

    Raises CheckpointError where the log is no journal's.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, spare_segments: int = 2):
        self.folder = folder
        self.segment_bytes, self.spare_segments = segment_bytes, spare_segments
        self.nbytes = 0  # of the live records
        self._live: dict[int, _Record] = {}
        self._segments: dict[int, _Segment] = {}
        self._spare: list[int] = []
        self._files: dict[int, WornFile] = {}  # of the segments written to since the start
        self._current = -1
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log.jsonl"
        self._log_fd = os.open(self._log, os.O_RDWR | os.O_CREAT, 0o644)
        self._log_bytes = self._num_lines = 0
        self._replay()
        self._recycle()
        self._next_segment()

    def put(self, order: int, head: Mapping[str, Any], batch: pa.RecordBatch) -> None:
        """Writes a group down; `head` is anything that JSON holds, and comes back as JSON has it.

        Raises OSError where the disk is full: the group is not put then, and the journal can still be used.
        """
        assert order not in self._live, f"the group at {order} is in {self.folder} already"
        if self._segments[self._current].end >= self.segment_bytes:
            self._next_segment()
        segment = self._segments[self._current]
        length = self._files[self._current].write(stream_of(batch), segment.end)
        place = {"segment": self._current, "offset": segment.end, "length": length}
        line = self._append({"put": order, "head": dict(head), **place})
        self._take(order, _Record(**place, line=line))

    def drop(self, orders: Iterable[int]) -> None:
        """These groups are done with; those that are not here are ignored.

        Raises OSError where the disk is full: all of them stay then.
        """
        known = [order for order in dict.fromkeys(orders) if order in self._live]
        if not known:
            return
        self._append({"drop": known})
        for order in known:
            self._forget(order)
        self._recycle()

    def refill(self) -> list[tuple[dict[str, Any], pa.RecordBatch]]:
        """Head and batch of each live group, in order. The batches are views of the files: copy what must outlast the
        next `drop` and `put`, which may write over them."""
        maps = {number: map_file(self._path(number)) for number in {r.segment for r in self._live.values()}}
        return [
            (json.loads(record.line)["head"], read_batch(maps[record.segment].slice(record.offset, record.length)))
            for _, record in sorted(self._live.items(), key=lambda pair: pair[0])
        ]

    def close(self) -> None:
        """Lets go of the files; what is live stays in them."""
        for file in self._files.values():
            file.close()
        os.close(self._log_fd)

    # Records ----------------------------------------------------------------------------------------------------

    def _take(self, order: int, record: _Record) -> None:
        segment = self._segments.setdefault(record.segment, _Segment())
        segment.num_live += 1
        segment.end = record.end
        self._live[order] = record
        self.nbytes += record.length

    def _forget(self, order: int) -> None:
        record = self._live.pop(order)
        self._segments[record.segment].num_live -= 1
        self.nbytes -= record.length

    # Segments ---------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self.folder / f"segment-{number:06d}.arrow"

    def _next_segment(self) -> None:
        """Makes a spare segment the current one, or a new one; the last one freed is the likeliest in memory."""
        number = self._spare[-1] if self._spare else next(n for n in itertools.count() if n not in self._segments)
        if number not in self._files:
            self._files[number] = WornFile(self._path(number))
        self._current = number
        self._segments[number] = _Segment()
        self._spare = self._spare[:-1]

    def _recycle(self) -> None:
        """Frees the segments without live records."""
        for number in [n for n, segment in self._segments.items() if not segment.num_live]:
            if number == self._current:
                self._segments[number].end = 0
                continue
            del self._segments[number]
            if len(self._spare) < self.spare_segments:
                self._spare.append(number)
            else:
                self._path(number).unlink(missing_ok=True)
                if number in self._files:
                    self._files.pop(number).close()

    # The log ----------------------------------------------------------------------------------------------------

    def _append(self, entry: Mapping[str, Any]) -> bytes:
        """Writes a line down. A log that has grown long is written anew first: if that fails, `entry` is not in."""
        line = _line(entry)
        if self._num_lines >= len(self._live) + MAX_DEAD_LINES:
            self._compact()
        self._log_bytes += write_whole(self._log_fd, [line], self._log_bytes)
        self._num_lines += 1
        return line

    def _compact(self) -> None:
        """Puts a log of only the live records in the place of the old one."""
        lines = [_line({"boot": _boot_id()}), *(record.line for record in self._live.values())]
        new = self.folder / "log.jsonl.new"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            log_bytes = write_whole(fd, lines, 0)
            new.replace(self._log)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._log_fd)
        self._log_fd, self._log_bytes, self._num_lines = fd, log_bytes, len(lines)

    def _replay(self) -> None:
        """Reads the log: cuts off a line that a dead process left half written, and leaves out records whose data are
        not there."""
        for path in self.folder.glob(f"segment-{'[0-9]' * 6}.arrow"):
            self._segments[int(path.stem.removeprefix("segment-"))] = _Segment()
        text = self._log.read_bytes()
        self._log_bytes = text.rfind(b"\n") + 1
        os.ftruncate(self._log_fd, self._log_bytes)
        lines = text[: self._log_bytes].splitlines(keepends=True)
        self._num_lines = len(lines)
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                if number > 1:
                    self._replay_line(entry, line)
                elif entry["boot"] != _boot_id():
                    break
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{self._log}, line {number} is no line of a journal ({type(error).__name__}: {error}): remove the "
                    f"folder {self.folder}; the groups in it are made again"
                ) from error
        if not self._live:
            self._compact()
        sizes = {number: self._path(number).stat().st_size for number in self._segments if self._path(number).exists()}
        # The line must go too: later records would fill the file up to where it points.
        self.drop([order for order, record in self._live.items() if record.end > sizes.get(record.segment, 0)])

    def _replay_line(self, entry: Mapping[str, Any], line: bytes) -> None:
        if "put" in entry:
            order = entry["put"]
            if order in self._live:
                raise ValueError(f"the group at {order} is put twice")
            place = {key: entry[key] for key in ("segment", "offset", "length")}
            self._take(order, _Record(**place, line=line))
        else:
            for order in entry["drop"]:
                self._forget(order)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _boot_id() -> str:
    """Differs each time the machine starts; "" where the system does not say, and then journals are always believed."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
