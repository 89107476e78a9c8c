"""Batches on disk: any batch, in whatever portions the kernel takes it, whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rollstream.graphs import disk
from rollstream.graphs.disk import (
    MAX_BUFFERS_A_CALL,
    WornFile,
    map_file,
    read_batch,
    replaces_in_place,
    stream_of,
    write_whole,
)

WIDE = pa.RecordBatch.from_pydict({f"c{i}": [i, None] for i in range(20)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_a_batch_comes_back_from_where_it_was_written(fd, path):
    length = write_whole(fd, stream_of(WIDE), 64)
    assert read_batch(map_file(path).slice(64, length)).equals(WIDE)


def test_big_columns_are_not_copied():
    batch = pa.RecordBatch.from_pydict({"n": pa.array(range(100_000), pa.int64())})
    before = pa.total_allocated_bytes()
    pieces = stream_of(batch)
    assert pa.total_allocated_bytes() == before
    assert batch["n"].buffers()[1].address in [p.address for p in pieces if isinstance(p, pa.Buffer)]


def test_a_slice_is_written_without_its_parent():
    batch = pa.RecordBatch.from_pydict({"n": pa.array(range(100_000), pa.int64())})
    assert sum(map(len, stream_of(batch.slice(5, 2)))) < 1000


def test_more_pieces_than_one_call_takes(fd, path):
    wider = pa.RecordBatch.from_pydict({f"c{i}": [i, None] for i in range(MAX_BUFFERS_A_CALL)})
    write_whole(fd, stream_of(wider), 0)
    assert read_batch(map_file(path)).equals(wider)


@pytest.mark.parametrize("num_bytes", [1, 7, 300])
def test_a_call_that_writes_only_some_bytes_goes_on(fd, path, monkeypatch, num_bytes):
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: write(fd, [b"".join(pieces)[:num_bytes]], at))
    length = write_whole(fd, stream_of(WIDE), 0)
    assert length == path.stat().st_size
    assert read_batch(map_file(path)).equals(WIDE)


def test_a_file_has_its_old_size_again_when_the_disk_is_full(fd, path, monkeypatch):
    write_whole(fd, [b"before"], 0)
    write = os.pwritev

    def half(fd: int, pieces: list[memoryview], offset: int) -> int:
        write(fd, [b"".join(pieces)[:4]], offset)
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwritev", half)
    with pytest.raises(OSError, match="no space"):
        write_whole(fd, [b"after"], 6)
    assert path.read_bytes() == b"before"


@pytest.fixture(params=[True, False], ids=["mapped", "by calls"])
def worn(request, path, monkeypatch):
    monkeypatch.setattr(disk, "replaces_in_place", lambda path: request.param)
    file = WornFile(path)
    yield file
    file.close()


def test_a_worn_file_holds_what_was_written_last(worn, path):
    assert [worn.write([b"0123", b"", b"456789"], 0), worn.write([b"ab", b"c"], 2), worn.write([b"xyz"], 8)] == [
        10,
        3,
        3,
    ]
    assert worn.write([b"-"], 0) == 1
    assert path.read_bytes() == b"-1abc567xyz"


def test_a_worn_file_is_written_over_without_a_call(path, monkeypatch):
    monkeypatch.setattr(disk, "replaces_in_place", lambda path: True)
    file = WornFile(path)
    length = file.write(stream_of(WIDE), 0)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("a system call wrote"))
    file.write([bytes(length)], 0)
    assert file.write(stream_of(WIDE), 0) == length
    assert read_batch(map_file(path)).equals(WIDE)
    file.close()


@pytest.mark.parametrize(("kind", "in_place"), [("ext4", True), ("btrfs", False), ("overlay", False)])
def test_only_file_systems_known_to_replace_in_place_are_mapped(tmp_path, monkeypatch, kind, in_place):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:999 / /sys rw - tmpfs sysfs rw\n27 1 {number} / / rw shared:1 - {kind} /dev/vda rw\n")
    monkeypatch.setattr(disk, "MOUNTS", mounts)
    assert replaces_in_place(tmp_path) is in_place
    mounts.unlink()
    assert not replaces_in_place(tmp_path)
