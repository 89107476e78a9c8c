"""A source made of recordings: which groups it gives, under which orders, with which columns and metrics."""

from __future__ import annotations

import pickle
from pathlib import Path

from rollstream.graphs.replay import ReplaySource
from rollstream.stages.schema import Rollouts, Scored, WithRef


def source(*files: str, schemas=(Rollouts,)) -> ReplaySource:
    return ReplaySource(ReplaySource.Config(path=files), name="sampler", schemas=schemas)


def given(source: ReplaySource, skip: frozenset[int] = frozenset(), start: int = 0) -> list[tuple[str, int]]:
    """(id, order) of each group."""
    return [(g["group_id"][0].as_py(), g["order"][0].as_py()) for g in source.rows(skip, start)]


def test_orders_have_no_gaps_and_begin_at_0(recorded):
    file = recorded("sampler", Rollouts, [7, 4, 9])
    assert given(source(file)) == [("g4", 0), ("g7", 1), ("g9", 2)]


def test_what_is_known_is_passed_over(recorded):
    file = recorded("sampler", Rollouts, range(10, 15))
    assert given(source(file), frozenset({3}), 2) == [("g12", 2), ("g14", 4)]


def test_columns_are_the_recorded_ones_in_every_row(recorded):
    (group,) = source(recorded("sampler", Rollouts, [3, 5])).rows(frozenset(), 1)
    assert dict(zip(group.schema.names, group.schema.types, strict=True)) == Rollouts.columns
    assert group["sample_id"].to_pylist() == ["g5.0", "g5.1"]
    assert group["order"].to_pylist() == [1, 1]


def test_recorded_metrics_come_with_their_group(recorded):
    made = source(recorded("sampler", Rollouts, [0, 1], rollout_tokens=3.0))
    next(made.rows(frozenset(), 0))
    assert made.metrics.take() == {"rollout/tokens": (3.0, 1.0)}


def test_several_recordings_give_the_groups_of_all_with_all_columns(recorded):
    files = recorded("score", Scored, [1, 2, 5], a_x=1.0), recorded("ref", WithRef, [0, 1, 5], a_y=2.0)
    made = source(*files, schemas=(Scored, WithRef))
    assert made.faults() == []
    assert given(made) == [("g1", 0), ("g5", 1)]
    group = next(made.rows(frozenset(), 1))
    assert {"reward", "ref_logprobs", "response_ids"} <= set(group.schema.names)
    assert made.metrics.means() == {"a/x": 1.0, "a/y": 2.0}


def test_recordings_of_two_runs_have_no_group_in_common(recorded):
    files = recorded("score", Scored), recorded("ref", WithRef, run="b")
    (fault,) = source(*files, schemas=(Scored, WithRef)).faults()
    assert fault.endswith("b-ref.arrows have no group in common: all must be recorded in one run")


def test_a_column_that_is_missing_is_named(recorded):
    file = recorded("sampler", Rollouts, without="loss_mask")
    (fault,) = source(file).faults()
    assert fault == f"{file} has no column 'loss_mask' (list<item: bool>), which Rollouts has: record it again"


def test_a_column_of_another_type_is_named(recorded, monkeypatch):
    file = recorded("sampler", Rollouts)
    monkeypatch.setitem(Rollouts.columns, "weight_version", Scored.columns["reward"])
    (fault,) = source(file).faults()
    assert fault == f"{file}: column 'weight_version' must be double, got list<item: int32>: record it again"


def test_the_fingerprint_is_of_the_groups_and_not_of_the_place(recorded, tmp_path):
    file = recorded("sampler", Rollouts)
    before = source(file).fingerprint()
    moved = str(Path(file).rename(tmp_path / "moved.arrows"))
    assert source(moved).fingerprint() == before
    recorded("sampler", Rollouts, [0, 1])
    assert source(file).fingerprint() != before


def test_a_recording_that_grows_gives_what_it_had_when_it_was_checked(recorded):
    made = source(recorded("sampler", Rollouts, [0, 1]))
    assert made.faults() == []
    recorded("sampler", Rollouts, [2])
    assert given(pickle.loads(pickle.dumps(made))) == [("g0", 0), ("g1", 1)]
