"""The runner on a real cluster with toy stages: what is trained, when, where, and how a run ends."""

from __future__ import annotations

import re
import time
import urllib.request
from contextlib import closing

import pytest
import ray
from mlflow import MlflowClient
from toys import diary_of, toy_graph

from rollstream import Bundle, Placement, run
from rollstream.stages.errors import CheckpointError, PlacementError, StageError, StalledError

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def test_every_group_is_trained_once_in_order_with_all_its_columns(tmp_path):
    graph = toy_graph(tmp_path / "d", with_ref=True)
    steps = list(run(graph, steps=3, out=tmp_path / "out"))
    assert [s.index for s in steps] == [1, 2, 3]
    assert [row["order"] for row in diary_of(tmp_path / "d")] == list(range(12))
    assert steps[0].metrics["reward/mean"] == 1.5
    assert {"ref_logprobs", "advantages", "reward"} <= set(diary_of(tmp_path / "d")[0]["columns"])
    assert (tmp_path / "out/model/number").read_text() == "3"


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_group_is_older_than_max_staleness(tmp_path, staleness):
    graph = toy_graph(tmp_path / "d", max_staleness=staleness, sleep_s=0.3)
    list(run(graph, steps=5, out=tmp_path / "out"))
    ages = [row["trained_at"] - row["made_by"] for row in diary_of(tmp_path / "d")]
    assert max(ages) == staleness


def test_data_parallel_ranks_share_a_step_and_replicas_of_a_map_stage_the_groups(tmp_path):
    placement = Placement(replicas={"score": 2})
    list(run(toy_graph(tmp_path / "d", num_ranks=2), steps=2, out=tmp_path / "out", placement=placement))
    diary = diary_of(tmp_path / "d")
    assert sorted(row["order"] for row in diary) == list(range(8))
    assert [row["rank"] for row in diary].count(0) == 4


def test_prompts_that_end_leave_a_short_last_step(tmp_path):
    steps = list(run(toy_graph(tmp_path / "d", count=6), steps=None, out=tmp_path / "out"))
    assert [s.metrics["step/groups"] for s in steps] == [4, 2]


def test_resume_goes_on_where_the_checkpoint_ends(tmp_path):
    out = tmp_path / "out"
    for step in run(toy_graph(tmp_path / "d"), steps=9, out=out, save_every=2):
        if step.index == 2:
            break
    with pytest.raises(CheckpointError, match="is there already"):
        run(toy_graph(tmp_path / "d"), steps=4, out=out)
    steps = list(run(toy_graph(tmp_path / "d"), steps=4, out=out, resume="must"))
    assert [s.index for s in steps] == [3, 4]
    assert [row["order"] for row in diary_of(tmp_path / "d")] == list(range(16))
    with pytest.raises(CheckpointError, match=r"count.groups_per_step: the checkpoint has '4', now it is '2'"):
        run(toy_graph(tmp_path / "d", groups_per_step=2), steps=6, out=out, resume="auto")


def test_a_stage_that_raises_ends_the_run_with_its_own_error(tmp_path):
    begun = time.monotonic()
    with pytest.raises(StageError, match="the toy divides by zero") as caught:
        list(run(toy_graph(tmp_path / "d", score={"fail_at": 5}), steps=3, out=tmp_path / "out"))
    assert (caught.value.stage, caught.value.subject) == ("score", "g5")
    assert time.monotonic() - begun < 60


def test_a_stage_that_does_not_load_ends_the_run_and_its_record(tmp_path):
    with pytest.raises(StageError, match="the toy does not load"):
        list(run(toy_graph(tmp_path / "d", score={"loads": False}), steps=1, out=tmp_path / "out"))
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert record.info.status == "FAILED"


def test_a_stage_that_sticks_is_named(tmp_path):
    with pytest.raises(StalledError, match="stage score has worked on g1 for"):
        list(run(toy_graph(tmp_path / "d", score={"stick_at": 1}), steps=1, out=tmp_path / "out", stall_s=8))


def test_actors_sit_where_they_were_asked_to(tmp_path):
    """Read from Ray's own table while the run goes on."""
    placement = Placement.fixed([Bundle(1), Bundle(2)], {"echo": 1, "count": [1, 0]})
    graph = toy_graph(tmp_path / "d", num_ranks=2)
    with closing(run(graph, steps=9, out=tmp_path / "out", placement=placement)) as steps:
        next(steps)
        bundles = _seats()
    assert bundles == [
        {"StageHost": 4},  # numbers, score, weigh, count rank 1
        {"StageHost": 2},  # echo, count rank 0
    ]


def test_spread_gives_each_stage_a_bundle(tmp_path):
    placement = Placement.spread()
    with closing(run(toy_graph(tmp_path / "d"), steps=9, out=tmp_path / "out", placement=placement)) as steps:
        next(steps)
        assert _seats() == [{"StageHost": 1}] * 5


def test_edges_and_stages_are_measured_where_prometheus_looks(tmp_path):
    with closing(run(toy_graph(tmp_path / "d"), steps=200, out=tmp_path / "out")) as steps:
        wanted = {
            'rollstream_edge_put_groups_total{.*Edge="numbers -> echo"',
            'rollstream_stage_busy_seconds{.*stage="echo"',
            "rollstream_staleness_versions_count{",
        }
        deadline = time.monotonic() + 60
        while wanted and time.monotonic() < deadline:
            next(steps)
            time.sleep(0.5)
            text = _metrics()
            wanted = {w for w in wanted if not re.search(w, text, re.IGNORECASE)}
        assert not wanted


def test_a_bundle_that_fits_nowhere_is_refused_before_any_actor(tmp_path):
    with pytest.raises(PlacementError, match=r"no node has room for a bundle of 64 CPU.*node 0: 8 CPU, 0 GPU"):
        list(run(toy_graph(tmp_path / "d"), steps=1, out=tmp_path / "o", placement=Placement.colocated(cpus=64)))


def test_nothing_is_left_after_a_run(tmp_path):
    list(run(toy_graph(tmp_path / "d"), steps=1, out=tmp_path / "out"))
    deadline = time.monotonic() + 20
    while (alive := _alive()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive == []


def _metrics() -> str:
    """All metrics of the node, as Prometheus reads them."""
    (node,) = ray.nodes()
    with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10) as page:
        return page.read().decode()


def _alive() -> list:
    from ray.util.state import list_actors

    here = ray.get_runtime_context().gcs_address
    return list_actors(here, filters=[("state", "=", "ALIVE")], detail=True)


def _seats() -> list[dict[str, int]]:
    """Live actors by bundle, from Ray's placement-group table and actor table."""
    table = ray.util.placement_group_table()
    (group,) = [g for g in table.values() if g["state"] == "CREATED"]
    seats: list[dict[str, int]] = [{} for _ in group["bundles"]]
    for actor in _alive():
        if actor.placement_group_id != group["placement_group_id"]:
            continue
        named = (key.split("_") for key in actor.required_resources)  # CPU_group_<bundle>_<group id>
        (index,) = {int(parts[2]) for parts in named if len(parts) == 4 and parts[1] == "group"}
        seats[index][actor.class_name] = seats[index].get(actor.class_name, 0) + 1
    return seats


def test_a_run_that_is_only_tried_out_leaves_no_checkpoint(tmp_path, ray_cluster):
    out = tmp_path / "out"
    steps = list(run(toy_graph(tmp_path / "d"), steps=2, out=out, save_every=None))
    assert [step.checkpoint for step in steps] == [None, None]
    assert not list(out.glob("checkpoints/step_*"))
