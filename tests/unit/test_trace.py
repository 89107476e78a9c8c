"""A group's story, told from files that the run's own writers made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollstream.graphs.checkpoint import Checkpoints, RunState
from rollstream.graphs.edge_actor import quarantine
from rollstream.graphs.group_log import GroupLog
from rollstream.graphs.group_trace import trace_group
from rollstream.graphs.item import Item, Left, Leg
from rollstream.graphs.joiner import Joined
from rollstream.graphs.journal import Journal
from rollstream.graphs.ledger import Ledger, OpenGroup
from rollstream.stages.errors import ConfigError

NOON = 1_000_000.0
ROWS = pa.RecordBatch.from_pydict({"n": [1]})


def item(order: int, *stages: str) -> Item:
    trail = tuple(Leg(stage=stage, begun=NOON + 4 * i, seconds=2.0) for i, stage in enumerate(stages))
    return Item(group_id=f"g{order}", order=order, version=0, birth="b", num_rows=8, trail=trail)


def joined(*orders: int) -> list[Joined]:
    return [Joined(items=(item(order, "prompts", "rollout"), item(order, "prompts", "ref"))) for order in orders]


def put(folder: Path, stage: str, *items: Item) -> Journal:
    journal = Journal(folder / "journal" / stage)
    for each in items:
        journal.put(each.order, each.to_json(), ROWS)
    return journal


def save(folder: Path, step: int, ledger: Ledger, *under_way: OpenGroup) -> None:
    checkpoints = Checkpoints(folder / "checkpoints")
    writing = checkpoints.begin(step)
    (writing / "weights").touch()
    common: dict[str, Any] = {"data": "", "graph": "", "settings": {}, "packages": {}}
    checkpoints.publish(writing, RunState(step=step, version=step, ledger=ledger.to_json(under_way), **common))


def lines(folder: Path, group: str) -> list[str]:
    """What is told, without the heading."""
    return trace_group(folder, group, now=NOON + 150).splitlines()[2:]


@pytest.fixture
def log(tmp_path: Path) -> GroupLog:
    return GroupLog(tmp_path / "groups.jsonl")


def log_trained(log: GroupLog, step: int, version: int, groups: list[Joined]) -> None:
    log.trained(step, groups, [version - group.version for group in groups])


def test_a_trained_group_shows_when_each_stage_had_it(log, tmp_path):
    log_trained(log, 2, 1, joined(7))
    begun, head, *stages, trained = lines(tmp_path, "g7")
    assert begun.endswith(", 2.5 min ago")
    assert head.split() == ["stage", "begun", "at", "after", "took"]
    assert [stage.split()[0] for stage in stages] == ["prompts", "rollout", "ref"]
    assert stages[1].split()[2:6] == ["4.00", "s", "2.00", "s"]
    assert trained == "trained as step 2, on weights 1 version newer than those that began it; 8 samples"


def test_bars_stand_where_the_times_are(log, tmp_path):
    log_trained(log, 1, 0, [Joined(items=(item(0, "a", "b"),))])
    head, first, second = lines(tmp_path, "g0")[1:4]
    bars = head.index("took") + len("took  ")
    assert first[bars:] == "=" * 13  # 2 of 6 s, of 40 characters
    assert second[bars:] == " " * 26 + "=" * 13


def test_a_group_is_found_by_its_order_too(log, tmp_path):
    log_trained(log, 2, 1, joined(6, 7))
    assert trace_group(tmp_path, "7", now=NOON) == trace_group(tmp_path, "g7", now=NOON)
    assert trace_group(tmp_path, "7", now=NOON).startswith(f"group g7, order 7, in {tmp_path}\n\n")


def told(folder: Path, group: str) -> list[str]:
    """Without the times."""
    return [line.partition(",")[0] for line in lines(folder, group) if not line.startswith(" ")]


def test_steps_that_were_lost_are_told_and_what_came_after(log, tmp_path):
    log_trained(log, 5, 4, joined(5))
    log_trained(log, 7, 6, joined(7))
    log.resumed(5)
    log_trained(log, 6, 5, joined(6))
    log_trained(log, 7, 6, joined(7))
    assert told(tmp_path, "g7") == [
        "trained as step 7",
        "lost with a process: the run went back to step 5",
        "trained again as step 7",
    ]
    assert told(tmp_path, "g5") == ["trained as step 5"]


@pytest.mark.parametrize("lost", [(0, 1), (0,)])
def test_a_run_that_began_anew_is_known_by_its_steps(log, tmp_path, lost):
    for step, order in enumerate(lost, start=1):
        log_trained(log, step, step - 1, joined(order))
    log_trained(log, 1, 0, joined(0))
    back = "lost with a process: the run went back to its beginning"
    assert told(tmp_path, "g0") == ["trained as step 1", back, "trained again as step 1"]


def test_a_lost_group_is_under_way_again(log, tmp_path):
    put(tmp_path, "prompts", item(7, "prompts"))
    log_trained(log, 7, 6, joined(7))
    assert told(tmp_path, "g7") == ["trained as step 7"]
    log.resumed(5)
    assert told(tmp_path, "g7")[2:] == ["under way: the journals of the edges behind prompts hold it"]


def test_a_group_that_left_after_the_checkpoint_is_lost_with_it(log, tmp_path):
    for order, group_id in enumerate(["early", "late"]):
        log.left(Left(order=order, group_id=group_id, kind="filtered", stage="reward", reason="equal"))
        log_trained(log, order + 1, order, joined(order + 5))
    log.resumed(1)
    assert told(tmp_path, "early") == ["filtered at reward: equal"]
    assert told(tmp_path, "late")[1:] == ["lost with a process: the run went back to step 1"]


def test_a_filtered_group_says_where_and_why(log, tmp_path):
    log.left(Left(order=3, group_id="g3", kind="filtered", stage="advantage", reason="all rewards are equal"))
    assert lines(tmp_path, "g3") == ["filtered at advantage: all rewards are equal"]


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_group_that_is_set_aside_says_why_and_where_its_rows_are(log, tmp_path, is_logged):
    left = Left(order=3, group_id="g3", kind="quarantined", stage="reward", reason="it died 2 times")
    quarantine(tmp_path / "quarantine", left, item(3, "prompts", "rollout"), ROWS)
    log_trained(log, 1, 0, joined(0))
    if is_logged:
        log.left(left)
    *stages, why, rows = lines(tmp_path, "g3")
    assert "rollout" in stages[-1]
    assert (why, rows) == ("quarantined at reward: it died 2 times", f"its rows: {tmp_path}/quarantine/3.arrow")


def test_a_group_under_way_is_where_the_journals_have_it(tmp_path):
    put(tmp_path, "prompts", item(4, "prompts"), item(5, "prompts"))
    put(tmp_path, "rollout", item(4, "prompts", "rollout")).drop([4])
    assert told(tmp_path, "g4") == ["under way: the journals of the edges behind prompts hold it"]
    put(tmp_path, "reward", item(4, "prompts", "rollout", "reward"))
    assert told(tmp_path, "4")[-1] == "under way: the journals of the edges behind prompts"
    assert lines(tmp_path, "4")[-1].endswith("prompts, reward hold it")
    assert lines(tmp_path, "4")[-2].split()[0] == "reward"


def test_reading_changes_no_file_of_a_run_that_goes_on(log, tmp_path):
    put(tmp_path, "prompts", item(4, "prompts"))
    with open(tmp_path / "journal/prompts/log.jsonl", "a") as file:
        file.write('{"put": 5, "he')
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    trace_group(tmp_path, "g4", now=NOON)
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_the_newest_checkpoint_knows_what_the_log_does_not(tmp_path):
    ledger = Ledger()
    ledger.commit([0, 1])
    ledger.leave(Left(order=2, group_id="g2", kind="filtered", stage="reward", reason="equal"))
    save(tmp_path, 1, Ledger())
    save(tmp_path, 2, ledger, OpenGroup(order=3, group_id="g3", state="produced", version=1))
    (tmp_path / "checkpoints/step_000009").mkdir()
    assert trace_group(tmp_path, "1", now=NOON).startswith("the group of order 1, in ")
    assert lines(tmp_path, "1") == ["trained as step 1 (as of checkpoint step_000002)"]
    assert lines(tmp_path, "g2") == ["filtered at reward: equal (as of checkpoint step_000002)"]
    assert lines(tmp_path, "g3") == ["produced (as of checkpoint step_000002)"]


@pytest.mark.parametrize(
    ("group", "hint"), [("g21", "did you mean 'g2', 'g1'"), ("99", "Orders 0 to 2 are known"), ("-1", "Orders 0 to 2")]
)
def test_an_unknown_group_is_refused_with_the_nearest(log, tmp_path, group, hint):
    log_trained(log, 1, 0, joined(0, 1, 2))
    with pytest.raises(ConfigError, match=f"knows no group '{group}': ") as caught:
        trace_group(tmp_path, group, now=NOON)
    assert hint in str(caught.value)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: it has no groups.jsonl, no journal and no checkpoints"):
        trace_group(tmp_path, "0", now=NOON)
