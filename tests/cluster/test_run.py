"""The runner on a real cluster with toy stages: what is trained, when, where, and how a run ends."""

from __future__ import annotations

import time

import pytest
import ray
from toys import diary_of, toy_graph

from rollstream import Placement, run
from rollstream.stages.errors import CheckpointError, PlacementError, StageError, StalledError

pytestmark = pytest.mark.cluster


def test_every_group_is_trained_once_in_order(tmp_path):
    graph = toy_graph(tmp_path / "d", with_ref=True)
    steps = list(run(graph, steps=3, out=tmp_path / "out"))
    assert [s.index for s in steps] == [1, 2, 3]
    assert [row["order"] for row in diary_of(tmp_path / "d")] == list(range(12))
    assert steps[0].metrics["reward/mean"] == 1.5
    assert {"ref_logprobs", "advantages", "reward"} <= set(diary_of(tmp_path / "d")[0]["columns"])
    assert (tmp_path / "out/model/number").read_text() == "3"
