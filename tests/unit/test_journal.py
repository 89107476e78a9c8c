"""The journal of an edge: what is put is there after any death, what is dropped is not, and the disk does not fill."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.graphs import journal
from rollstream.graphs.journal import Journal
from rollstream.stages.errors import CheckpointError

#: Of most journals here: a few records each, so that segments come and go.
SEGMENT_BYTES = 4000


def batch_of(order: int, num_rows: int = 100) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array([order] * num_rows, pa.int64())})


def head_of(order: int) -> dict[str, Any]:
    return {"group_id": f"g{order}", "metrics": {"loss": [1.5, 2]}}


def put(into: Journal, *orders: int, num_rows: int = 100) -> None:
    for order in orders:
        into.put(order, head_of(order), batch_of(order, num_rows))


def held(by: Journal) -> list[int]:
    """The orders of what refills, after a look at every byte of it."""
    orders = [int(head["group_id"][1:]) for head, _ in by.refill()]
    for order, (head, batch) in zip(orders, by.refill(), strict=True):
        batch.validate(full=True)
        assert head == head_of(order)
        assert set(batch["n"].to_pylist()) <= {order}
    return orders


def reopened(old: Journal) -> Journal:
    """As after the death of the process that had it open: nothing is told to the old one."""
    return Journal(old.folder, segment_bytes=old.segment_bytes, spare_segments=old.spare_segments)


def held_again(by: Journal) -> list[int]:
    """As `held`, of a process that is started after the one that has it open."""
    with closing(reopened(by)) as again:
        return held(again)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "journal", segment_bytes=SEGMENT_BYTES)) as made:
        yield made


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch):
    """Makes the disk full in the middle of the nth write from now on, and from then on."""
    write = os.pwritev

    def fill(after: int) -> None:
        calls = iter(range(after))

        def pwritev(fd: int, pieces: list[memoryview], offset: int) -> int:
            if next(calls, None) is not None:
                return write(fd, pieces, offset)
            write(fd, [b"".join(pieces)[: sum(map(len, pieces)) // 2]], offset)
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "pwritev", pwritev)

    return fill


# What goes in comes out ---------------------------------------------------------------------------------------------


def test_what_was_put_refills_in_order(fresh):
    put(fresh, 5, 0, 3)
    assert held(fresh) == held_again(fresh) == [0, 3, 5]


def test_lists_maps_texts_nulls_and_the_metadata_of_a_schema_survive(fresh):
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([[1, 2], None, []], pa.list_(pa.int32())),
            pa.array([[("a", 1.0)], None, []], pa.map_(pa.string(), pa.float64())),
            pa.array(["x", None, ""]),
            pa.array([True, None, False]),
        ],
        schema=pa.schema(
            {"l": pa.list_(pa.int32()), "m": pa.map_(pa.string(), pa.float64()), "s": pa.string(), "b": pa.bool_()},
            metadata={"made by": "hand"},
        ),
    )
    fresh.put(0, {}, batch)
    fresh.put(1, {}, batch.slice(0, 0))
    with closing(reopened(fresh)) as again:
        (_, whole), (_, empty) = again.refill()
    assert whole.equals(batch, check_metadata=True)
    assert empty.equals(batch.slice(0, 0), check_metadata=True)


def test_a_refilled_batch_is_a_view_of_the_file(fresh):
    put(fresh, 0)
    before = pa.total_allocated_bytes()
    (_, batch), *_ = fresh.refill()
    assert pa.total_allocated_bytes() == before
    assert batch.num_rows == 100


def test_what_is_dropped_is_gone(fresh):
    put(fresh, 0, 1, 2)
    fresh.drop([1, 0, 1, 7])
    assert held(fresh) == held_again(fresh) == [2]


def test_what_was_dropped_may_be_put_again(fresh):
    put(fresh, 0)
    fresh.drop([0])
    put(fresh, 0)
    assert held_again(fresh) == [0]


def test_bytes_are_those_of_live_groups(fresh):
    put(fresh, 0, 1)
    both = fresh.nbytes
    fresh.drop([0])
    assert both == 2 * fresh.nbytes > 1600
    with closing(reopened(fresh)) as again:
        assert again.nbytes == fresh.nbytes


def test_a_group_that_is_there_is_not_put_twice(fresh):
    put(fresh, 0)
    with pytest.raises(AssertionError, match="the group at 0 is in"):
        put(fresh, 0)


def test_a_head_that_json_does_not_hold_leaves_all_as_it_was(fresh):
    with pytest.raises(TypeError, match="not JSON serializable"):
        fresh.put(0, {"x": object()}, batch_of(0))
    put(fresh, 1)
    assert held(fresh) == held_again(fresh) == [1]


def test_a_closed_journal_holds_no_file_open(fresh):
    before = len(os.listdir("/proc/self/fd"))
    again = reopened(fresh)
    put(again, *range(20))
    again.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Segments -----------------------------------------------------------------------------------------------------------


def test_files_and_bytes_on_disk_stay_bounded(fresh):
    for order in range(200):
        put(fresh, order)
        fresh.drop([order - 8])
    files = list(fresh.folder.glob("segment-*"))
    # Nine live records at most lie in two or three segments of 4000 bytes, and two are spare.
    assert len(files) <= 5
    assert sum(f.stat().st_size for f in files) <= 5 * (SEGMENT_BYTES + 1200)
    assert held_again(fresh) == list(range(192, 200))


def test_no_more_segments_than_the_spare_ones_stay(fresh):
    put(fresh, *range(40))
    assert len(list(fresh.folder.glob("segment-*"))) > 5
    fresh.drop(range(40))
    assert len(list(fresh.folder.glob("segment-*"))) == 3
    assert held_again(fresh) == []
    assert len(list(fresh.folder.glob("segment-*"))) == 2


def test_segments_that_no_line_names_are_free(fresh):
    for number in range(10, 16):
        (fresh.folder / f"segment-{number:06d}.arrow").write_bytes(bytes(8))
    assert held_again(fresh) == []
    assert len(list(fresh.folder.glob("segment-*"))) == 2


def test_a_segment_is_written_over_in_place(fresh):
    put(fresh, 0, num_rows=400)
    (file,) = fresh.folder.glob("segment-*")
    before = file.stat()
    fresh.drop([0])
    put(fresh, 1, num_rows=1)
    assert (file.stat().st_ino, file.stat().st_size) == (before.st_ino, before.st_size)
    assert held_again(fresh) == [1]


def test_a_record_longer_than_the_spare_file_grows_it(fresh):
    put(fresh, 0, num_rows=10)
    fresh.drop([0])
    put(fresh, 1, num_rows=5000)
    assert held_again(fresh) == [1]


def test_a_record_does_not_overwrite_those_that_were_there_before_a_restart(fresh):
    put(fresh, 0, 1)
    with closing(reopened(fresh)) as again:
        put(again, *range(2, 12))
    assert held_again(fresh) == list(range(12))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 9), st.integers(0, 300)),
            st.tuples(st.just("drop"), st.lists(st.integers(0, 9), max_size=4), st.just(0)),
            st.tuples(st.just("reopen"), st.none(), st.just(0)),
        ),
        max_size=40,
    )
)
def test_any_sequence_of_puts_drops_and_restarts(tmp_path, steps):
    shutil.rmtree(tmp_path / "journal", ignore_errors=True)
    current = Journal(tmp_path / "journal", segment_bytes=3000, spare_segments=1)
    model: dict[int, int] = {}  # order -> rows
    for what, which, num_rows in steps:
        if what == "put" and which not in model:
            put(current, which, num_rows=num_rows)
            model[which] = num_rows
        elif what == "drop":
            current.drop(which)
            model = {o: n for o, n in model.items() if o not in which}
        elif what == "reopen":
            current.close()
            current = reopened(current)
        assert held(current) == sorted(model)
        assert [batch.num_rows for _, batch in current.refill()] == [model[o] for o in sorted(model)]
    current.close()


# The log ------------------------------------------------------------------------------------------------------------


def cuts(log: Path) -> list[int]:
    """Every length that the log may have while its last line is written."""
    text = log.read_bytes()
    return list(range(text[:-1].rfind(b"\n") + 1, len(text)))


def test_a_put_whose_line_is_torn_never_was(fresh):
    put(fresh, 0, 1)
    log = fresh.folder / "log.jsonl"
    text = log.read_bytes()
    for length in cuts(log):
        log.write_bytes(text[:length])
        with closing(reopened(fresh)) as again:
            assert held(again) == [0]
            assert log.read_bytes().endswith(b"\n")
            again.drop([0])  # a line that is shorter than most of the torn ones
        assert held_again(fresh) == []


def test_a_drop_whose_line_is_torn_never_was(fresh):
    put(fresh, 0, 1, 2)
    fresh.drop([0, 2])
    log = fresh.folder / "log.jsonl"
    text = log.read_bytes()
    for length in cuts(log):
        log.write_bytes(text[:length])
        assert held_again(fresh) == [0, 1, 2]


def test_a_first_line_that_is_torn_makes_an_empty_journal(fresh):
    log = fresh.folder / "log.jsonl"
    text = log.read_bytes()
    for length in cuts(log):
        log.write_bytes(text[:length])
        with closing(reopened(fresh)) as again:
            put(again, 1)
        assert held_again(fresh) == [1]


@pytest.mark.parametrize("missing", ["last byte", "all bytes", "file"])
def test_a_group_whose_data_are_not_there_is_left_out_for_good(fresh, missing):
    put(fresh, 0, 1)
    (file,) = fresh.folder.glob("segment-*")
    size = file.stat().st_size
    os.truncate(file, size - 1 if missing == "last byte" else 0)
    if missing == "file":
        file.unlink()
    left = [0] if missing == "last byte" else []
    assert held_again(fresh) == left
    os.truncate(file, size) if file.exists() else file.write_bytes(bytes(size))
    assert held_again(fresh) == left


@pytest.mark.parametrize(
    "line", ["", "{", "3", "[]", "{}", '{"put": 9}', '{"drop": 4}', '{"drop": [4]}', "\0\0", "{}x"]
)
@pytest.mark.parametrize("number", [1, 3])
def test_a_line_that_is_none_of_a_journal_is_refused_with_its_place(fresh, line, number):
    put(fresh, 0, 1)
    log = fresh.folder / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[: number - 1], line, *lines[number - 1 :], ""]))
    with pytest.raises(
        CheckpointError, match=rf"log.jsonl, line {number} is no line .*remove the folder .*journal; the"
    ):
        reopened(fresh)


def test_a_group_put_twice_in_the_log_is_refused(fresh):
    put(fresh, 0)
    log = fresh.folder / "log.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[1] + "\n")
    with pytest.raises(CheckpointError, match=r"line 3 .*the group at 0 is put twice"):
        reopened(fresh)


def test_a_journal_of_before_the_machine_started_is_empty(fresh, monkeypatch, tmp_path):
    put(fresh, 0)
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(journal, "BOOT_ID", boot)
    with closing(reopened(fresh)) as again:
        assert held(again) == []
        put(again, 0)
    assert held_again(fresh) == [0]


def test_the_log_stays_short(fresh, monkeypatch):
    monkeypatch.setattr(journal, "MAX_DEAD_LINES", 10)
    put(fresh, 1000, 1001)
    for order in range(100):
        put(fresh, order)
        fresh.drop([order])
        assert len((fresh.folder / "log.jsonl").read_text().splitlines()) <= 14
    assert held(fresh) == held_again(fresh) == [1000, 1001]


@pytest.mark.parametrize("moment", ["while the new log is written", "before it takes the place of the old one"])
def test_a_death_while_the_log_is_written_anew_loses_nothing(fresh, monkeypatch, full_disk, moment):
    monkeypatch.setattr(journal, "MAX_DEAD_LINES", 1)
    put(fresh, 0, 1)
    if moment.startswith("while"):
        full_disk(after=0)
    else:
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match=r"no space|killed"):
        fresh.drop([0])
    monkeypatch.undo()
    assert held(fresh) == held_again(fresh) == [0, 1]
    fresh.drop([0])
    assert held_again(fresh) == [1]


# A full disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])
def test_a_put_on_a_full_disk_never_was(fresh, monkeypatch, full_disk, after):
    put(fresh, 0)
    sizes = {f: f.stat().st_size for f in fresh.folder.iterdir()}
    full_disk(after=after)  # 0: in the data, 1: in the line of the log
    with pytest.raises(OSError, match="no space"):
        put(fresh, 1)
    monkeypatch.undo()
    assert held(fresh) == held_again(fresh) == [0]
    if after == 0:
        assert {f: f.stat().st_size for f in sizes} == sizes
    put(fresh, 1, 2)
    assert held(fresh) == held_again(fresh) == [0, 1, 2]


def test_a_drop_on_a_full_disk_never_was(fresh, monkeypatch, full_disk):
    put(fresh, 0, 1)
    full_disk(after=0)
    with pytest.raises(OSError, match="no space"):
        fresh.drop([0])
    monkeypatch.undo()
    assert held(fresh) == held_again(fresh) == [0, 1]


def test_half_a_record_over_a_free_segment_does_not_come_back(fresh, monkeypatch, full_disk):
    put(fresh, 0)
    fresh.drop([0])
    full_disk(after=0)
    with pytest.raises(OSError, match="no space"):
        put(fresh, 1)
    monkeypatch.undo()
    assert held_again(fresh) == []
