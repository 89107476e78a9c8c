from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollstream.graphs.report import LiveView, drawn, step_line
from rollstream.graphs.stats import EdgeStats, Snapshot, StageStats, Step


def edge(name: str = "rollout -> reward", groups: int = 3, nbytes: int = 3 << 20, age_s: float = 2.5) -> EdgeStats:
    return EdgeStats(
        name=name,
        groups=groups,
        leased=1,
        nbytes=nbytes,
        max_groups=8,
        max_bytes=64 << 20,
        oldest_age_s=age_s,
        oldest_group="p3",
        total_groups=40,
        redelivered=0,
        closed=False,
    )


def stage(name: str = "rollout", busy_s: float = 75.0, wait_s: float = 25.0, working_on: str = "") -> StageStats:
    return StageStats(name=name, busy_s=busy_s, wait_s=wait_s, working_on=working_on, working_s=3.2)


def snapshot(**changes: object) -> Snapshot:
    fields = {"graph": "grpo", "step": 12, "steps": 200, "elapsed_s": 3725.0} | changes
    return Snapshot(**fields)  # type: ignore[arg-type]


def text_of(view: Snapshot, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(drawn(view))
    return file.getvalue().splitlines()


def test_header_names_graph_step_time_and_rate():
    header = text_of(snapshot(metrics={"time/tokens_per_s": 1840.2}))[0]
    assert header.split() == ["grpo", "step", "12/200", "1:02:05", "1,840", "tokens/s"]


def test_header_without_a_last_step():
    assert "step 12   1:02:05" in text_of(snapshot(steps=None))[0]


def test_metrics_that_tell_of_trouble_come_first():
    rows = text_of(snapshot(metrics={"a/first": 1.0, "reward/mean": 0.4375, "actor/kl": 0.001}))
    assert rows[2].split() == ["reward/mean", "0.4375", "a/first", "1"]
    assert rows[3].split() == ["actor/kl", "0.001"]


def test_metrics_past_the_limit_are_counted():
    rows = text_of(snapshot(metrics={f"m/{i:02}": float(i) for i in range(20)}))
    assert rows[-1].strip() == "and 8 more"


def test_edge_shows_groups_and_bytes_against_their_bounds_and_the_oldest():
    row = text_of(snapshot(edges=(edge(),)))[2]
    assert "rollout -> reward  3/8     3 MiB/64 MiB  2.5 s" in row


def test_full_edge_stands_out():
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=True).print(drawn(snapshot(edges=(edge(groups=8), edge(groups=7)))))
    assert "\x1b[33m8/8" in file.getvalue()
    assert "\x1b[33m7/8" not in file.getvalue()


def test_stage_bar_shows_the_share_of_computing():
    row = text_of(snapshot(stages=(stage(working_on="p7-0"),)))[2]
    assert row.split() == ["rollout", "75%", "█" * 18 + "░" * 6, "p7-0", "3.2", "s"]


def test_stage_that_has_not_begun_has_no_share():
    assert text_of(snapshot(stages=(stage(busy_s=0.0, wait_s=0.0),)))[2].split()[1] == "-"


@pytest.mark.parametrize("width", [80, 132])
def test_long_names_are_cut_not_wrapped(width: int):
    view = snapshot(
        graph="g" * 200,
        metrics={"reward/" + "x" * 90: 1.0},
        edges=(edge(name="e" * 120),),
        stages=(stage(name="s" * 60, working_on="group-" + "9" * 60),),
    )
    rows = text_of(view, width)
    assert len(rows) == 7
    assert max(map(len, rows)) <= width


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "0 B"), (1023 * 1024, "1023 KiB"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_read_well(nbytes: int, shown: str):
    assert f"{shown}/64 MiB" in text_of(snapshot(edges=(edge(nbytes=nbytes),)))[2]


def test_step_line_off_a_terminal_is_one_line():
    file = io.StringIO()
    with LiveView(Console(file=file, width=40)) as view:
        view.show(snapshot())
        view.step(Step(index=3, version=4, metrics={"reward/mean": 0.5, "other": 1.0}, checkpoint="runs/a/step_3"))
    assert file.getvalue() == "step 3  version 4  reward/mean 0.5  saved runs/a/step_3\n"


def test_step_line_keeps_a_number_that_is_not_finite():
    assert "actor/loss nan" in step_line(Step(index=1, version=1, metrics={"actor/loss": float("nan")}))


def test_terminal_shows_the_live_view_and_messages_but_no_step_lines():
    file = io.StringIO()
    with LiveView(Console(file=file, width=80, force_terminal=True)) as view:
        view.show(snapshot(stages=(stage(),)))
        view.message("reward [bold] timed out")
        view.step(Step(index=3, version=4, metrics={}))
    shown = file.getvalue()
    assert "rollout" in shown
    assert "reward [bold] timed out" in shown
    assert "version 4" not in shown
