"""What a reward function gets, may return, and what becomes of its errors."""

from __future__ import annotations

import asyncio
import functools
import time

import numpy as np
import pyarrow as pa
import pytest

from rollstream.stages.base import World
from rollstream.stages.errors import ConfigError, PluginError
from rollstream.stages.reward import Reward, reward
from rollstream.stages.reward.outcome import Score, as_score
from rollstream.stages.schema import Rollouts, Scored, validate


@pytest.mark.parametrize("one", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), (1.0, {})])
def test_numbers_are_scores(one):
    assert as_score(one) == Score(1.0, {})


def test_none_abstains_and_parts_are_kept():
    assert as_score(None) == Score(None, {})
    assert as_score((None, {"a": 1})) == Score(None, {"a": 1.0})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        ((1.0, {"a": float("nan")}), "part 'a'"),
        ("1.0", "got str '1.0'"),
        ({"score": 1.0, "acc": 1}, "keys 'score', 'acc'; return a number, or a pair"),
        ([1.0], "got list"),
        ((1.0, {2: 1.0}), "names of reward parts"),
    ],
)
def test_all_else_is_refused(returned, said):
    with pytest.raises((TypeError, ValueError), match=said):
        as_score(returned)


def test_columns_fit_the_schema_and_parts_may_differ_by_sample(score, rollouts):
    def by_length(response):
        return (1.0, {"long": 1.0, "x": 2.0}) if len(response) > 1 else None

    _, stage = score(by_length, ["a"])
    columns = stage.process(rollouts(["a", "bb"]))
    assert columns["reward"].to_pylist() == [None, 1.0]
    assert columns["reward_parts"].to_pylist() == [[], [("long", 1.0), ("x", 2.0)]]
    wanted = {n: t for n, t in Scored.columns.items() if n not in Rollouts.columns}
    validate(pa.RecordBatch.from_pydict(dict(columns)), wanted, Scored.nullable, "reward")


def test_metrics_are_means_over_samples(score):
    def halves(response):
        return None if response == "skip" else (0.5, {"mean": 2.0})

    _, stage = score(halves, ["a", "skip", "b", "c"])
    means = stage.metrics.means()
    assert (means["reward/mean"], means["reward/abstained"], means["reward/errors"]) == (0.5, 0.25, 0.0)
    assert means["reward/part/mean"] == 2.0


def test_target_and_meta_arrive_as_they_were_and_fresh(score):
    def spoil(target, meta, sample_id):
        good = target == {"n": 12345678901234567890123} and meta == {"split": "train"}
        target.clear()
        meta["split"] = sample_id
        return float(good)

    target = {"n": 12345678901234567890123}
    assert score(spoil, ["a", "b"], target=target, meta={"split": "train"})[0] == [1.0, 1.0]


def test_all_sample_arguments_go_to_keyword_arguments(rollouts):
    stage = Reward(Reward.Config(function=lambda **all_of_them: 1.0))
    assert len(stage._arguments) == 7


def test_params_reach_the_function(score):
    assert score(lambda response, factor: len(response) * factor, ["ab"], params={"factor": 2})[0] == [4.0]


@reward(name="batch_rank", batch=True)
def batch_rank(response, target):
    assert isinstance(response, list)
    return [float(i) for i in range(len(response))] if target[0] == "yes" else [0.0]


def test_a_batch_function_gets_lists_and_gives_one(score):
    assert score(batch_rank, ["a", "b", "c"])[0] == [0.0, 1.0, 2.0]


def test_a_batch_function_must_score_each_sample(score):
    with pytest.raises(PluginError, match="a score a sample: 3, got 1"):
        score("batch_rank", ["a", "b", "c"], target="no")


@reward(name="batch_stuck", batch=True)
async def batch_stuck(response):
    while "bad" in response:
        await asyncio.sleep(1)
    return [1.0] * len(response)


def test_a_batch_that_overruns_times_out_whole(score, rollouts):
    rewards, stage = score(functools.partial(batch_stuck), ["a", "bad"], timeout_s=0.2)
    assert rewards == [0.0, 0.0]
    assert stage.process(rollouts(["a", "b"]))["reward"].to_pylist() == [1.0, 1.0]


async def wait_and_score(response, seconds=0.0):
    await asyncio.sleep(seconds)
    return 1.0


class Judge:
    async def __call__(self, response):
        return 1.0

    async def method(self, response):
        return 1.0


def hidden(response):
    return wait_and_score(response)


@pytest.mark.parametrize(
    "function", [wait_and_score, functools.partial(wait_and_score, seconds=0.01), Judge(), Judge().method, hidden]
)
def test_what_is_awaitable_is_awaited(score, function):
    assert score(function, ["a", "b"])[0] == [1.0, 1.0]


def test_async_samples_of_a_group_run_together(score, rollouts):
    _, stage = score(functools.partial(wait_and_score, seconds=0.4), ["a"])
    start = time.monotonic()
    stage.process(rollouts(["a"] * 10))
    assert time.monotonic() - start < 2.0


def test_a_function_may_run_a_loop_of_its_own(score):
    def own_loop(response):
        return asyncio.run(wait_and_score(response))

    assert score(own_loop, ["a", "b"])[0] == [1.0, 1.0]


def one_in_two(response):
    if response == "bad":
        raise LookupError("no such thing")
    return 1.0


def test_an_exception_names_sample_and_line_and_ends_the_run(score):
    with pytest.raises(PluginError) as caught:
        score(one_in_two, ["good", "bad"])
    assert (caught.value.stage, caught.value.subject) == ("reward", "sample r000001.e0.1")
    assert caught.value.cause.startswith("Traceback")
    assert "in one_in_two" in caught.value.cause
    assert "worker.py" not in caught.value.cause
    assert "LookupError: no such thing" in str(caught.value)


def test_an_exception_may_abstain_and_is_counted(score):
    rewards, stage = score(one_in_two, ["good", "bad", "good", "good"], on_error="abstain")
    assert rewards == [1.0, None, 1.0, 1.0]
    assert stage.metrics.means()["reward/errors"] == 0.25
    assert stage.metrics.means()["reward/abstained"] == 0.0
    assert "no such thing" in stage.first_error


def test_a_function_that_exits_raises(score):
    def leave(response):
        raise SystemExit(0)

    with pytest.raises(PluginError, match="SystemExit"):
        score(leave, ["a"])


def test_setup_starts_the_worker_and_loads_the_function():
    class Unloadable:
        def __call__(self, response):
            return 1.0

        def __reduce__(self):
            return int, ("not a number",)

    with pytest.raises(PluginError, match="invalid literal"):
        Reward(Reward.Config(function=Unloadable())).setup(World())


def test_wrong_settings_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        Reward.Config(function="length", timeout_s=0, timeout_score=float("nan"), on_error="fial")
    assert len(caught.value.faults) == 3
    assert "did you mean 'fail'?" in str(caught.value)
