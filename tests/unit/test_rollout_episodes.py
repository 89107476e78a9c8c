"""Rollout functions: what reaches the engine, what comes of it, and what goes wrong."""

from __future__ import annotations

import asyncio
import functools
import threading
import time

import numpy as np
import pytest
from small_episodes import EOS, LIMITS, Digits, Scripted, group

from rollstream.stages.base import Metrics
from rollstream.stages.errors import EngineDied, PluginError, StageError
from rollstream.stages.rollout import Trajectory
from rollstream.stages.rollout.engine import Request, Sampling
from rollstream.stages.rollout.episodes import EpisodeLimits, Episodes


@pytest.fixture
def play():
    """play(engine, function, ...): the samples of one group; the driver is `play.driver`, and ends with the test."""
    made: list[Episodes] = []

    def run(
        engine, function, tools=None, *, n=1, max_tokens=20, names=("g0",), seconds=20.0, clock=time.monotonic, **limits
    ):
        given = {"max_turns": 4, "max_turn_tokens": None, "turn_timeout_s": 20.0} | limits
        driver = Episodes(
            engine,
            function,
            tools or {},
            tokenizer=Digits(),
            model_limits=LIMITS,
            limits=EpisodeLimits(**given),
            stage="rollout",
            metrics=Metrics(),
            clock=clock,
        )
        driver.version = 3
        run.driver = driver
        made.append(driver)
        for name in names:
            ids = tuple(f"{name}.{i}" for i in range(n))
            sampling = Sampling(max_tokens=max_tokens)
            request = Request(request_id=name, prompt_ids=[11, 12], sample_ids=ids, sampling=sampling)
            driver.submit(request, group(name))
        found = dict(filter(None, (driver.finished(seconds) for _ in names)))
        return found["g0"]

    yield run
    for driver in made:
        driver.close()


async def two_turns(engine, prompt, tools):
    trajectory = Trajectory(prompt)
    text = await engine.turn(trajectory)
    engine.say(trajectory, await tools["double"](text))
    await engine.turn(trajectory)
    return trajectory


def double(text: str) -> str:
    return str(2 * int(text))


def test_the_second_turn_goes_on_from_exactly_the_tokens_of_the_first(play):
    engine = Scripted([12, 11, EOS], [15, EOS])
    play(engine, two_turns, {"double": double})
    first, second = engine.requests
    assert Digits()("21", add_special_tokens=False).input_ids != [12, 11]  # the text of turn 1 would come out otherwise
    assert list(first.prompt_ids) == [11, 12]
    assert list(second.prompt_ids) == [11, 12, 12, 11, EOS, 50 + 42]


def test_only_what_was_sampled_is_in_the_loss(play):
    (sample,) = play(Scripted([12, 11, EOS], [15, EOS]), two_turns, {"double": double})
    assert sample.response_ids.tolist() == [12, 11, EOS, 92, 15, EOS]
    assert sample.mask.tolist() == [True, True, True, False, True, True]
    assert sample.logprobs.tolist() == [-1.5, -1.375, -0.125, 0.0, -1.875, -0.125]
    assert sample.versions.tolist() == [3] * 6
    assert sample.finish_reason == "stop"


def test_what_a_tool_says_changes_nothing_that_was_sampled_before(play):
    one, other = (
        play(Scripted([12, 11, EOS], [15, EOS]), two_turns, {"double": tool})[0] for tool in (double, lambda _: "17")
    )
    assert one.response_ids.tolist() != other.response_ids.tolist()
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_said_tokens_carry_the_version_of_the_token_before(play):
    engine = Scripted([12, EOS], [15, EOS])

    async def told(engine_, prompt, tools):
        engine.version = 7
        trajectory = Trajectory(prompt)
        engine_.say(trajectory, "42")
        await engine_.turn(trajectory)
        engine_.say(trajectory, "42")
        return trajectory

    (sample,) = play(engine, lambda engine, prompt, tools: told(engine, prompt, tools))
    assert sample.versions.tolist() == [3, 7, 7, 7]


def test_each_turn_is_a_request_with_an_id_of_its_own(play):
    engine = Scripted([12, EOS], [15, EOS])
    play(engine, two_turns, {"double": double}, n=2)
    assert [r.sample_ids for r in engine.requests] == [("g0.0",), ("g0.1",), ("g0.0#2",), ("g0.1#2",)]


def test_the_response_and_a_turn_have_their_limits(play):
    async def until_done(engine, prompt, tools):
        trajectory = Trajectory(prompt)
        while not trajectory.done:
            await engine.turn(trajectory)
            engine.say(trajectory, "42")
        return trajectory

    engine = Scripted([12, 12, 12, 12], [13, 13, 13, 13], [14, 14, 14, 14])
    (sample,) = play(engine, until_done, max_tokens=8, max_turn_tokens=3)
    assert [r.sampling.max_tokens for r in engine.requests] == [3, 3]
    assert sample.response_ids.tolist() == [12, 12, 12, 92, 13, 13, 13, 92]
    assert sample.finish_reason == "length"
    (sample,) = play(engine, until_done, max_turns=1)
    assert sample.response_ids.tolist() == [12, 12, 12, 12, 92]


def test_the_models_context_is_a_limit_and_words_are_cut_at_it(play):
    async def talkative(engine, prompt, tools):
        assert prompt.max_tokens == 38
        trajectory = Trajectory(prompt)
        await engine.turn(trajectory)
        engine.say(trajectory, [5] * 100)
        assert trajectory.done
        return trajectory

    (sample,) = play(Scripted([12, EOS]), talkative, max_tokens=1000)
    assert sample.response_ids.tolist() == [12, EOS] + [5] * 36
    assert sample.finish_reason == "length"


def test_an_empty_turn_is_a_turn(play):
    (sample,) = play(Scripted([EOS], [EOS]), two_turns, {"double": lambda text: "42" + text})
    assert sample.response_ids.tolist() == [EOS, 92, EOS]


def test_a_function_sees_its_prompt_and_async_tools(play):
    async def look(engine, prompt, tools):
        assert (prompt.sample_id, prompt.ids, prompt.text) == ("g0.0", (11, 12), "12")
        assert (prompt.target, prompt.meta, prompt.max_turns) == ([4], {"k": 1}, 4)
        assert engine.decode(engine.encode("42")) == "82"
        trajectory = Trajectory(prompt)
        await engine.turn(trajectory)
        engine.say(trajectory, [await tools["one"](), await tools["two"]()])
        return trajectory

    async def one():
        return 81

    main = threading.current_thread()
    tools = {"one": one, "two": lambda: 82 if threading.current_thread() is not main else 0}
    (sample,) = play(Scripted([12, EOS]), look, tools)
    assert sample.response_ids.tolist() == [12, EOS, 81, 82]


@pytest.mark.parametrize("continuous", [False, True])
def test_groups_are_whole_and_counted(play, continuous):
    samples = play(Scripted([12, EOS], [15, EOS], continuous=continuous), two_turns, {"double": double}, n=5)
    assert [s.response_ids.tolist() for s in samples] == [[12, EOS, 54, 15, EOS]] * 5
    sums = play.driver._metrics.take()
    assert sums == {"rollout/turns": (10, 5), "rollout/said_tokens": (5, 5)}


def test_an_engine_that_works_in_batches_waits_for_every_function(play):
    gate = threading.Barrier(3)  # passed only when all three samples are at their tool

    def meet(text):
        gate.wait(timeout=20)
        return double(text)

    engine = Scripted([12, EOS], [15, EOS])
    play(engine, two_turns, {"double": meet}, n=3)
    assert [sorted(b) for b in engine.batches] == [["g0.0", "g0.1", "g0.2"], ["g0.0#2", "g0.1#2", "g0.2#2"]]


def test_a_continuous_engine_waits_for_none(play):
    turn = threading.Event()

    def slow_for_one(text):
        assert turn.wait(20)
        return double(text)

    async def first_waits(engine, prompt, tools):
        if prompt.sample_id == "g0.0":
            return await two_turns(engine, prompt, tools)
        trajectory = Trajectory(prompt)
        await engine.turn(trajectory)
        await engine.turn(trajectory)
        turn.set()  # only now may the other's tool end
        return trajectory

    samples = play(Scripted([12, EOS], [15, EOS], continuous=True), first_waits, {"double": slow_for_one}, n=2)
    assert [len(s.response_ids) for s in samples] == [5, 4]


def test_a_continuous_engine_gives_nothing_in_time(play):
    async def never(engine, prompt, tools):
        await asyncio.sleep(100)

    with pytest.raises(KeyError, match="g0"):
        play(Scripted(continuous=True), never, seconds=0.02)


def test_an_error_of_the_function_names_sample_file_and_line(play):
    async def broken(engine, prompt, tools):
        return 1 // 0

    with pytest.raises(PluginError) as error:
        play(Scripted([12, EOS]), broken)
    assert error.value.subject == "sample g0.0"
    assert "return 1 // 0\nZeroDivisionError" in str(error.value).replace("~~^^~~", "").replace("           \n", "")
    assert "episodes.py" not in str(error.value).replace("test_rollout_episodes.py", "")


def test_an_error_of_a_tool_names_the_tool_unless_it_is_caught(play):
    with pytest.raises(PluginError) as error:
        play(Scripted([EOS]), two_turns, {"double": double})
    assert "return str(2 * int(text))" in str(error.value)
    assert "Raised by tool 'double'." in str(error.value)

    async def brave(engine, prompt, tools):
        trajectory = Trajectory(prompt)
        try:
            await tools["double"](await engine.turn(trajectory))
        except ValueError:
            engine.say(trajectory, "99")
        return trajectory

    (sample,) = play(Scripted([EOS]), brave, {"double": double})
    assert len(sample.response_ids) == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_never_ends_is_named(play, is_async):
    begun, end = threading.Event(), threading.Event()

    async def awaits(text):
        begun.set()
        await asyncio.sleep(100)

    def blocks(text):
        begun.set()
        end.wait(100)

    with pytest.raises(PluginError, match=r"for 20 s \(turn_timeout_s\). It is in tool 'double', at:") as error:
        play(
            Scripted([12, EOS]),
            two_turns,
            {"double": awaits if is_async else blocks},
            clock=lambda: 99 * begun.is_set(),
        )
    assert 'engine.say(trajectory, await tools["double"](text))' in str(error.value)
    assert ("await asyncio.sleep(100)" in str(error.value)) == is_async
    end.set()


def test_a_function_that_holds_up_the_others_is_the_one_that_is_named(play):
    begun, end = threading.Event(), threading.Event()

    async def one_blocks(engine, prompt, tools):
        if prompt.sample_id == "g0.2":
            _ = begun.set() or end.wait(100)
        await asyncio.sleep(100)

    with pytest.raises(PluginError, match=r"sample g0\.2") as error:
        play(Scripted([12, EOS]), one_blocks, n=4, clock=lambda: 99 * begun.is_set())
    assert "begun.set() or end.wait(100)" in str(error.value)
    assert "run_forever" not in str(error.value)
    end.set()


async def nothing(engine, prompt, tools):
    return None


async def silent(engine, prompt, tools):
    return Trajectory(prompt)


async def past_the_end(engine, prompt, tools):
    trajectory = Trajectory(prompt)
    while True:
        await engine.turn(trajectory)


async def no_token(engine, prompt, tools):
    engine.say(Trajectory(prompt), [100])


async def ends_the_process(engine, prompt, tools):
    raise SystemExit(3)


async def gives_up(engine, prompt, tools):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (nothing, "must return a Trajectory, got NoneType"),
        (silent, "call engine.turn(trajectory) once at least"),
        (past_the_end, "2 of 2 turns (max_turns) and room for 16 tokens (max_tokens, the model's context)"),
        (no_token, "token ids must be from 0 to 99, got [100]"),
        (ends_the_process, "SystemExit: 3"),
        (gives_up, "CancelledError"),
    ],
)
def test_misuse_is_told(play, function, message):
    with pytest.raises(PluginError) as error:
        play(Scripted([12, EOS], [12, EOS], [12, EOS]), function, max_turns=2)
    assert message in str(error.value)


def test_a_trajectory_of_another_sample_is_refused(play):
    kept = []

    async def swapped(engine, prompt, tools):
        trajectory = Trajectory(prompt)
        await engine.turn(trajectory)
        kept.append(trajectory)
        return kept[0]

    with pytest.raises(PluginError, match="got one of another sample"):
        play(Scripted([12, EOS]), swapped, n=2)


def test_a_dead_engine_and_a_bad_prompt_pass_as_they_are(play):
    engine = Scripted([12, EOS])
    engine.finished = functools.partial(_dies, "gone")
    with pytest.raises(EngineDied, match="gone"):
        play(engine, two_turns, {"double": double})
    with pytest.raises(StageError, match="shorter than the model's context"):
        play.driver.submit(
            Request(request_id="long", prompt_ids=[5] * 40, sample_ids=("a",), sampling=Sampling(max_tokens=4)), group()
        )


def _dies(why, timeout_s):
    raise EngineDied(why)


def test_closing_ends_the_thread_and_what_waits_there(play):
    async def never(engine, prompt, tools):
        await asyncio.gather(asyncio.sleep(100), tools["long"]())

    with pytest.raises(KeyError):
        play(Scripted(continuous=True), never, {"long": lambda: time.sleep(0.1)}, n=3, seconds=0.02)
    play.driver.close()
    assert not play.driver._thread.is_alive()
