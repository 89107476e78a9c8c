"""A recording: groups come back in order, the last of each, and a death costs at most the group being written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstream.graphs.recording import Recorder, about_of, read
from rollstream.stages.errors import ConfigError, DataError

ABOUT = {"edge": "rollout", "graph": "grpo", "format": "1"}


def group_of(order: int, *, num_rows: int = 3) -> pa.RecordBatch:
    ids = pa.array([[order, i] for i in range(num_rows)], pa.list_(pa.int32()))
    return pa.RecordBatch.from_arrays([ids], schema=pa.schema({"ids": ids.type}, metadata={"made by": "hand"}))


def head_of(order: int, **more: Any) -> dict[str, Any]:
    return {"group_id": f"g{order}", "order": order, "metrics": {"loss": [1.5, 2]}, **more}


def record(path: Path, *orders: int, **more: Any) -> None:
    recorder = Recorder(path, ABOUT)
    for order in orders:
        recorder.add(head_of(order, **more), group_of(order))
    recorder.close()


def orders_in(path: Path) -> list[int]:
    """The orders that it holds, after a look at every byte."""
    found = list(read(path))
    for head, group in found:
        assert group.equals(group_of(head["order"]), check_metadata=True)
    return [head["order"] for head, _ in found]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recordings" / "rollout.arrows"


def test_groups_come_back_in_order_with_their_heads(path):
    record(path, 2, 0, 1)
    assert orders_in(path) == [0, 1, 2]
    assert [head for head, _ in read(path)] == [head_of(0), head_of(1), head_of(2)]
    assert about_of(path) == ABOUT


def test_a_group_of_no_rows_keeps_its_columns(path):
    recorder = Recorder(path, ABOUT)
    recorder.add({"order": 0}, group_of(0, num_rows=0))
    ((_, group),) = read(path)
    assert group.equals(group_of(0, num_rows=0), check_metadata=True)


def test_groups_of_different_columns_may_follow_each_other(path):
    other = pa.RecordBatch.from_pydict({"text": ["a", None]})
    recorder = Recorder(path, ABOUT)
    recorder.add({"order": 0}, group_of(0))
    recorder.add({"order": 1}, other)
    assert [group.schema.names for _, group in read(path)] == [["ids"], ["text"]]


def test_plain_arrow_reads_the_first_group(path):
    record(path, 4)
    assert pa.ipc.open_stream(path.read_bytes()).read_all().num_rows == 3


def test_what_is_added_can_be_read_at_once(path):
    recorder = Recorder(path, ABOUT)
    recorder.add(head_of(0), group_of(0))
    assert orders_in(path) == [0]
    recorder.add(head_of(1), group_of(1))
    assert orders_in(path) == [0, 1]


def test_groups_are_views_of_the_file(path):
    record(path, *range(5))
    before = pa.total_allocated_bytes()
    groups = list(read(path))
    assert pa.total_allocated_bytes() == before
    assert len(groups) == 5


def test_a_resumed_run_adds_to_the_file(path):
    record(path, 0, 1)
    record(path, 2)
    assert orders_in(path) == [0, 1, 2]


def test_of_a_position_recorded_twice_the_last_one_counts(path):
    record(path, 0, 1, version=3)
    record(path, 1, 2, version=4)
    assert [(head["order"], head["version"]) for head, _ in read(path)] == [(0, 3), (1, 4), (2, 4)]


def test_another_about_is_refused_with_every_field(path):
    record(path, 0)
    with pytest.raises(ConfigError) as caught:
        Recorder(path, {"edge": "reward", "graph": "grpo", "model": "m"})
    way_out = "record into another file, or remove this one"
    assert caught.value.faults == [
        f"{path}: it was recorded with edge 'rollout', and edge is 'reward' here: {way_out}",
        f"{path}: it was recorded with format '1', and format is None here: {way_out}",
        f"{path}: it was recorded with model None, and model is 'm' here: {way_out}",
    ]
    assert orders_in(path) == [0]


def test_a_head_without_an_order_is_our_own_fault(path):
    with pytest.raises(AssertionError, match="must have an order"):
        Recorder(path, ABOUT).add({"group_id": "g"}, group_of(0))


def test_a_record_torn_at_any_byte_is_left_out_and_cut_off(path):
    record(path, 0)
    first = path.stat().st_size
    record(path, 1, note="longer than those that follow" * 5)
    whole = path.read_bytes()
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert orders_in(path) == [0]
        record(path, 2)
        assert orders_in(path) == [0, 2]


def test_a_first_record_torn_at_any_byte_is_none(path):
    record(path, 0)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"rollout.arrows holds no group: .*`rollstream run --record EDGE`"):
            read(path)
        record(path, 1)
        assert orders_in(path) == [1]


def test_an_add_on_a_full_disk_never_was(path, monkeypatch):
    record(path, 0)
    recorder = Recorder(path, ABOUT)
    write = os.pwritev

    def half(fd: int, pieces: list[memoryview], offset: int) -> int:
        write(fd, [b"".join(pieces)[:99]], offset)
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwritev", half)
    size = path.stat().st_size
    with pytest.raises(OSError, match="no space"):
        recorder.add(head_of(1), group_of(1))
    monkeypatch.undo()
    assert path.stat().st_size == size
    recorder.add(head_of(2), group_of(2))
    assert orders_in(path) == [0, 2]


def test_a_file_that_is_not_there_is_no_recording(path):
    with pytest.raises(DataError, match=r"rollout.arrows is no recording: there is no such file.*--record EDGE"):
        about_of(path)


FOREIGN = {
    "text": (b"hello, world", "no Arrow stream begins at byte 0"),
    "a marker and no schema": (b"\xff\xff\xff\xff\x08\0\0\0 nonsense", "byte 0 begins no Arrow schema"),
}


@pytest.mark.parametrize("use", [read, about_of, lambda path: Recorder(path, ABOUT)], ids=["read", "about", "record"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused_and_stays(path, kind, use):
    content, reason = FOREIGN[kind]
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"rollout.arrows is no recording: .*{reason}.*`rollstream run --record EDGE`"):
        use(path)
    assert path.read_bytes() == content


def test_an_arrow_stream_of_someone_else_is_refused(path):
    path.parent.mkdir()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, group_of(0).schema) as writer:
        writer.write_batch(group_of(0))
    with pytest.raises(DataError, match=r"is no recording: its Arrow schema has no 'rollstream.about'"):
        read(path)


def test_what_lies_between_two_records_is_not_passed_over(path):
    record(path, 0)
    first = path.stat().st_size
    record(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:first] + bytes(16) + whole[first:])
    with pytest.raises(DataError, match=f"no Arrow stream begins at byte {first}, but"):
        read(path)
