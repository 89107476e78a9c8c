"""Checkpoints become visible all at once, a torn one is known as such, and the newest stay."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollstream.graphs.checkpoint import Checkpoints, faults
from rollstream.graphs.run_state import RunState
from rollstream.stages.errors import CheckpointError


def state(step: int = 1, **changes: Any) -> RunState:
    fields = {"version": step, "ledger": {"frontier": step * 4}, "data": "d", "graph": "a -> b", "settings": {}}
    return RunState(**({"step": step, "packages": {"ray": "2"}} | fields | changes))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep_last=2)


def save(checkpoints: Checkpoints, step: int, **changes: Any) -> Path:
    writing = checkpoints.begin(step)
    (writing / "ranks").mkdir()
    (writing / "ranks" / ".metadata").write_text("of all")
    (writing / "weights").write_text(f"of step {step} {changes}")
    return checkpoints.publish(writing, state(step, **changes))


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.root.iterdir())


def test_what_was_saved_comes_back(checkpoints):
    folder = save(checkpoints, 3, ledger={"ahead": [14, 17]}, tracking_run="r1")
    found = checkpoints.latest()
    assert (found.folder, found.state, found.passed_over) == (
        folder,
        state(3, ledger={"ahead": [14, 17]}, tracking_run="r1"),
        (),
    )
    assert (folder / "ranks" / ".metadata").read_text() == "of all"


def test_there_is_none_in_a_folder_that_is_not_there(checkpoints):
    assert checkpoints.latest() is None
    assert checkpoints.complete() == []


def test_the_state_lists_every_file_with_its_size(checkpoints):
    files = json.loads((save(checkpoints, 1) / "state.json").read_text())["files"]
    assert files == {"ranks/.metadata": 6, "weights": len("of step 1 {}")}


# What stays ---------------------------------------------------------------------------------------------------------


def test_the_newest_stay(checkpoints):
    for step in (9, 10, 100, 999_999, 1_000_000):
        save(checkpoints, step)
    assert names(checkpoints) == ["step_1000000", "step_999999"]
    assert [p.name for p in checkpoints.complete()] == ["step_999999", "step_1000000"]


def test_those_of_every_so_many_steps_stay_too(checkpoints):
    checkpoints.keep_every = 4
    for step in range(1, 12):
        save(checkpoints, step)
    assert names(checkpoints) == ["step_000004", "step_000008", "step_000010", "step_000011"]


def test_the_newest_stay_after_each_of_several_resumes(tmp_path):
    for step in range(1, 6):
        save(Checkpoints(tmp_path, keep_last=1), step)
        assert names(Checkpoints(tmp_path)) == [f"step_{step:06d}"]


def test_a_torn_one_does_not_count_as_one_of_the_newest(checkpoints):
    for step in (1, 2):
        folder = save(checkpoints, step)
    (folder / "weights").unlink()
    save(checkpoints, 3)
    assert names(checkpoints) == ["step_000001", "step_000003"]


def test_a_newer_torn_one_does_not_push_out_a_whole_one(checkpoints):
    checkpoints.keep_last = 1
    save(checkpoints, 5)
    (checkpoints.root / "step_000010").mkdir()
    save(checkpoints, 6)
    assert checkpoints.latest().state == state(6)
    assert names(checkpoints) == ["step_000006", "step_000010"]
    save(checkpoints, 10)
    assert names(checkpoints) == ["step_000010"]


@pytest.mark.parametrize(
    "name", ["step_000000_mine", "step_7", "step_0000001", ".step_000001.mine", "best", "notes.txt"]
)
def test_what_is_not_ours_is_left_alone(checkpoints, name):
    (checkpoints.root / name).mkdir(parents=True)
    (checkpoints.root / name / "mine").touch()
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert (checkpoints.root / name / "mine").is_file()
    assert len(checkpoints.complete()) == 2


def test_what_a_dead_run_left_goes_at_the_next_begin(checkpoints):
    save(checkpoints, 4)
    for left in (".step_000005.writing", ".step_000004.replaced", ".step_000001.removing"):
        (checkpoints.root / left / "ranks").mkdir(parents=True)
    checkpoints.begin(7)
    assert names(checkpoints) == [".step_000007.writing", "step_000004"]


def test_an_old_one_that_can_not_be_removed_is_told_and_tried_again(checkpoints, monkeypatch, caplog):
    checkpoints.keep_last = 1
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        save(checkpoints, 2)
    assert "step_000001.removing is of no use any more and can't be removed: [Errno 16]" in caplog.text
    save(checkpoints, 3)
    assert names(checkpoints) == ["step_000003"]


def refuse(path: Path) -> None:
    raise OSError(errno.EBUSY, "busy", str(path))


# One that is not whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights", "ranks/.metadata", "state.json"])
@pytest.mark.parametrize("cut", [lambda n: 0, lambda n: 1, lambda n: n // 2, lambda n: n - 1], ids="01hl")
def test_a_cut_file_sends_the_run_back_to_the_one_before(checkpoints, name, cut):
    save(checkpoints, 1)
    torn = save(checkpoints, 2) / name
    os.truncate(torn, cut(torn.stat().st_size))
    found = checkpoints.latest()
    assert found.state == state(1)
    assert len(found.passed_over) == 1
    assert found.passed_over[0].startswith(f"step_000002 is not whole: {name} ")
    assert checkpoints.complete() == [found.folder]


def test_only_newer_ones_are_told_as_passed_over(checkpoints):
    checkpoints.keep_last = 3
    for step in (1, 2, 3):
        folder = save(checkpoints, step)
        if step != 2:
            (folder / "weights").unlink()
    assert checkpoints.latest().passed_over == ("step_000003 is not whole: weights is missing",)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda raw: raw.pop("ledger"), "state.json lacks ledger"),
        (lambda raw: raw.update(mood="good"), "state.json has mood, which this version does not know"),
        (lambda raw: raw.update(step="1"), "state.json: step must be int, it is '1'"),
        (lambda raw: raw.update(files=[]), "state.json: files must be dict, it is []"),
        (lambda raw: raw.update(step=7), "state.json is of step 7"),
        (lambda raw: raw["files"].update(more=3), "more is missing"),
        (lambda raw: raw["files"].update(weights=3), "weights has 12 bytes, 3 were written"),
    ],
)
def test_each_fault_is_named(checkpoints, change, fault):
    folder = save(checkpoints, 1)
    raw = json.loads((folder / "state.json").read_text())
    change(raw)
    (folder / "state.json").write_text(json.dumps(raw))
    assert faults(folder) == [fault]


@pytest.mark.parametrize(
    ("text", "fault"), [("[]", "holds no JSON object"), ("3", "holds no JSON object"), ("{", "can't be read: ")]
)
def test_a_state_that_is_no_object_is_a_fault(checkpoints, text, fault):
    (save(checkpoints, 1) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"state.json {fault}"):
        checkpoints.latest()


def test_a_whole_one_has_no_faults(checkpoints):
    folder = save(checkpoints, 1)
    (folder / "notes").write_text("a file more is no fault")
    assert faults(folder) == []


def test_where_none_is_whole_each_is_told_with_the_way_out(checkpoints):
    older, newer = save(checkpoints, 1), save(checkpoints, 2)
    shutil.rmtree(older / "ranks")
    (newer / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.latest()
    assert str(caught.value) == (
        f"no checkpoint in {checkpoints.root} can be resumed:\n"
        "  - step_000002 is not whole: state.json is missing\n"
        "  - step_000001 is not whole: ranks/.metadata is missing\n"
        "Put back what is missing, or remove these folders and start afresh."
    )


# Saves that fail ----------------------------------------------------------------------------------------------------


def test_one_that_is_being_written_is_not_seen(checkpoints):
    old = save(checkpoints, 1)
    (checkpoints.begin(2) / "weights").write_text("half")
    assert checkpoints.complete() == [old]


def test_a_discarded_one_leaves_nothing(checkpoints):
    old = save(checkpoints, 1)
    writing = checkpoints.begin(2)
    (writing / "weights").write_text("half")
    checkpoints.discard(writing)
    checkpoints.discard(writing)
    assert list(checkpoints.root.iterdir()) == [old]


def test_an_empty_one_is_refused(checkpoints):
    with pytest.raises(
        CheckpointError, match=r"wrote nothing that can be seen in .*a file system that all of them share"
    ):
        checkpoints.publish(checkpoints.begin(1), state(1))
    assert checkpoints.latest() is None


def test_a_stage_may_not_write_the_run_s_own_file(checkpoints):
    writing = checkpoints.begin(1)
    (writing / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a file called state\.json"):
        checkpoints.publish(writing, state(1))


def test_a_file_that_is_still_being_written_is_noticed(checkpoints, monkeypatch):
    writing = checkpoints.begin(1)
    (writing / "weights").write_text("")
    monkeypatch.setattr(os, "fsync", lambda _: os.truncate(writing / "weights", next(sizes)))
    sizes = iter(range(4, 100))
    with pytest.raises(CheckpointError, match="changed while it was published: weights has 6 bytes, 4 were written"):
        checkpoints.publish(writing, state(1))


def test_a_full_disk_while_publishing_leaves_no_half_of_it(checkpoints, monkeypatch):
    old = save(checkpoints, 1)
    writing = checkpoints.begin(2)
    (writing / "weights").write_text("w")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="busy"):
            checkpoints.publish(writing, state(2))
    checkpoints.discard(writing)
    assert list(checkpoints.root.iterdir()) == [old]


def test_a_replacement_that_can_not_be_renamed_leaves_the_old_one_in_its_place(checkpoints, monkeypatch):
    save(checkpoints, 1, data="old")
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: refuse(old) if "writing" in str(old) else rename(old, new))
    with pytest.raises(OSError, match="busy"):
        save(checkpoints, 1, data="new")
    assert names(checkpoints) == [".step_000001.writing", "step_000001"]


def test_everything_is_on_disk_before_the_rename(checkpoints, monkeypatch):
    synced, rename = [], os.rename
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "rename", lambda old, new: (rename(old, new), synced.append("renamed")))
    save(checkpoints, 1)
    inside = [".metadata", "weights", "state.json", "ranks", ".step_000001.writing"]
    assert synced == [*inside, "renamed", "checkpoints"]
