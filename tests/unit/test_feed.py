"""When the update stage's ranks are given their groups, and which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.graphs.feed import Feed
from rollstream.stages.errors import StageError


class Joiner:
    """Groups are numbers, ready by `comes`; a group of n has n tokens."""

    def __init__(self) -> None:
        self.ready: list[Any] = []
        self.ended, self.error, self.waited = False, None, []

    def comes(self, *numbers: int) -> None:
        self.ready += [SimpleNamespace(num_tokens=n, items=(n,)) for n in numbers]

    def poll(self, timeout_s: float) -> int:
        self.waited.append(timeout_s)
        if self.error is not None:
            raise self.error
        return len(self.ready)

    def ask(self) -> None:
        pass

    def take(self, wanted: int) -> list[Any]:
        taken, self.ready = self.ready[:wanted], self.ready[wanted:]
        return taken


class Rank:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.take = SimpleNamespace(remote=lambda step, groups: self.calls.append((step, [g[0] for g in groups])))
        self.update = SimpleNamespace(remote=lambda step: self.calls.append(step))


@pytest.fixture
def scene() -> Any:
    """Steps of two groups; ranks 0 and 1 are shares of their own, rank 2 has share 0 too."""
    stage: Any = SimpleNamespace(groups_per_step=2, data_parallel_size=2, share_of=lambda rank: rank % 2)
    joiner: Any = Joiner()
    ranks = [Rank() for _ in range(3)]
    return SimpleNamespace(joiner=joiner, ranks=ranks, feed=Feed(stage, joiner, ranks))


def go_on() -> bool:
    return True


def test_each_rank_gets_its_share_and_then_trains(scene):
    scene.joiner.comes(5, 7)
    scene.feed.begin(1, scene.feed.wait(0.5, go_on))
    first, second, third = (rank.calls for rank in scene.ranks)
    assert sorted(first[0][1] + second[0][1]) == [5, 7]
    assert third == first
    assert [calls[1] for calls in (first, second)] == [1, 1]


def test_the_next_step_is_sent_once_while_one_is_trained_and_not_again(scene):
    scene.joiner.comes(1, 2, 3)
    scene.feed.begin(1, scene.feed.wait(0.5, go_on))
    scene.feed.look_ahead(2)
    assert len(scene.ranks[0].calls) == 2  # one group is not a step
    scene.joiner.comes(4, 5)
    for _ in range(3):
        scene.feed.look_ahead(2)
    groups = scene.feed.wait(0.5, go_on)
    assert [g.num_tokens for g in groups] == [3, 4]
    scene.feed.begin(2, groups)
    assert [c if isinstance(c, int) else c[0] for c in scene.ranks[0].calls] == [1, 1, 2, 2]
    assert [g.num_tokens for g in scene.joiner.ready] == [5]


def test_an_error_of_the_run_waits_until_the_step_is_done(scene):
    scene.joiner.error = StageError("score", "g3", "it raised")
    scene.feed.look_ahead(2)
    scene.joiner.error = None
    with pytest.raises(StageError, match="it raised"):
        scene.feed.wait(0.5, go_on)


def test_the_last_step_may_be_short_and_a_stop_gives_none(scene):
    scene.joiner.comes(4)
    assert scene.feed.wait(0.5, lambda: False) == []
    scene.joiner.ended = True
    groups = scene.feed.wait(0.5, go_on)
    scene.feed.begin(1, groups)
    assert [g.num_tokens for g in groups] == [4]
    assert sorted(len(rank.calls[0][1]) for rank in scene.ranks[:2]) == [0, 1]
