"""A run resumes only what is its own, and is told what else has changed."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from rollstream.graphs.run_state import (
    MAY_CHANGE,
    RunState,
    changed_layouts,
    changed_packages,
    check_same_run,
    installed_packages,
)
from rollstream.stages.errors import CheckpointError


def state(step: int = 1, **changes: Any) -> RunState:
    fields = {"version": step, "ledger": {}, "data": "d", "graph": "a -> b", "packages": {}}
    return RunState(**({"step": step, "settings": {"actor": {"lr": "0.1"}}} | fields | changes))


def test_a_resume_by_the_same_run_is_fine():
    check_same_run(state(3, tracking_run="r", packages={"ray": "2"}, ledger={"frontier": 3}), state(0))


def test_a_resume_by_another_run_is_refused_with_every_difference():
    saved = state(settings={"actor": {"lr": "0.1", "clip": "0.2"}, "rollout": {"n": "8"}})
    now = state(data="e", graph="a -> c", settings={"actor": {"lr": "0.3", "clip": "0.2"}, "rollout": {"n": "4"}})
    with pytest.raises(CheckpointError) as caught:
        check_same_run(saved, now)
    assert str(caught.value) == (
        "this checkpoint is of another run:\n"
        "  - data: the checkpoint was made on d, now it is e\n"
        "  - graph:\n"
        "    --- the checkpoint\n"
        "    +++ this run\n"
        "    @@ -1 +1 @@\n"
        "    -a -> b\n"
        "    +a -> c\n"
        "  - actor.lr: the checkpoint has '0.1', now it is '0.3'\n"
        "  - rollout.n: the checkpoint has '8', now it is '4'\n"
        "Go on with the old settings, or start afresh in another folder (out=...)."
    )


@pytest.mark.parametrize("name", ["groups_per_step", "n", "seed", "tp", "dp", "max_staleness", "dtype"])
def test_a_setting_that_changes_the_result_is_refused(name):
    with pytest.raises(CheckpointError, match=f"actor.{name}: the checkpoint has '1', now it is '2'"):
        check_same_run(state(settings={"actor": {name: "1"}}), state(settings={"actor": {name: "2"}}))


def test_a_setting_that_only_one_version_has_is_named_as_such():
    saved, now = {"actor": {"old": "1", "lr": "0.1"}}, {"actor": {"lr": "0.1", "new": "None"}}
    with pytest.raises(CheckpointError) as caught:
        check_same_run(state(settings=saved), state(settings=now))
    assert str(caught.value).splitlines()[1:3] == [
        "  - actor.new: it was not there when the checkpoint was made, now it is 'None'",
        "  - actor.old: the checkpoint has '1', it is not there now",
    ]


def test_a_stage_that_only_one_run_has_is_named_once():
    saved, now = {"a": {"x": "1", "y": "2"}}, {"b": {"x": "1", "y": "2"}}
    with pytest.raises(CheckpointError) as caught:
        check_same_run(state(settings=saved), state(settings=now))
    assert str(caught.value).splitlines()[1:3] == [
        "  - b: the checkpoint has no such stage",
        "  - a: the checkpoint has this stage, it is not there now",
    ]


@pytest.mark.parametrize("name", sorted(MAY_CHANGE))
@pytest.mark.parametrize("saved", [{}, "1"], ids=["new", "changed"])
def test_settings_that_change_nothing_of_the_result_may_differ(name, saved):
    before = {name: saved} if saved else {}
    check_same_run(state(settings={"reward": before}), state(settings={"reward": {name: "9"}}))


def test_packages_of_other_versions_are_told_and_not_refused():
    saved = state(packages={"ray": "2.59.0", "torch": "2.13.0", "megatron-core": "0.16.1"})
    now = state(packages={"ray": "2.60.0", "torch": "2.13.0", "rollstream": "1"})
    assert changed_packages(saved, now) == [
        "megatron-core: the checkpoint was made with 0.16.1, this run has none",
        "ray: the checkpoint was made with 2.59.0, this run has 2.60.0",
        "rollstream: the checkpoint was made with none, this run has 1",
    ]
    check_same_run(saved, now)


def test_packages_that_are_not_installed_are_left_out(monkeypatch):
    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    assert installed_packages() == {"rollstream": "1", "megatron-core": "1", "ray": "1"}


def test_another_layout_is_told_by_stage():
    saved = state(settings={"actor": {"layout": "tp 2"}, "ref": {"layout": "tp 1"}, "rollout": {"n": "8"}})
    now = state(settings={"actor": {"layout": "dp 2"}, "ref": {"layout": "tp 1"}, "rollout": {"n": "8"}})
    check_same_run(saved, now)
    assert changed_layouts(saved, now) == [
        "actor: the checkpoint was made with tp 2, this run has dp 2; it is the same state, and the numbers may differ "
        "in the last digits"
    ]
