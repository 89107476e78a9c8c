"""The record of groups for people; what it says of a group is in test_trace.py."""

from __future__ import annotations

from pathlib import Path

from rollstream.graphs.group_log import GroupLog, read_group_log
from rollstream.graphs.item import Left


def left(order: int) -> Left:
    return Left(order=order, group_id=f"g{order}", kind="filtered", stage="reward", reason="dull")


def test_lines_come_back_as_they_were_written(tmp_path: Path):
    path = tmp_path / "out" / "groups.jsonl"
    log = GroupLog(path)
    log.left(left(3)), log.resumed(2)
    told = {"order": 3, "group_id": "g3", "state": "filtered", "stage": "reward", "reason": "dull"}
    assert list(read_group_log(path)) == [told, {"resumed": 2}]


def test_a_line_that_a_kill_cut_short_takes_no_other_with_it(tmp_path: Path):
    path = tmp_path / "groups.jsonl"
    log = GroupLog(path)
    log.left(left(3))
    path.write_bytes(path.read_bytes() + b'{"order": 4, "gro')
    log.left(left(5)), log.left(left(6))
    assert [entry["order"] for entry in read_group_log(path)] == [3, 5, 6]


def test_without_a_record_there_is_nothing_to_read(tmp_path: Path):
    assert list(read_group_log(tmp_path / "groups.jsonl")) == []


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    GroupLog(tmp_path / "file" / "groups.jsonl").resumed(3)
    assert "groups.jsonl: " in capsys.readouterr().err
