"""The reward functions that come with rollstream."""

from __future__ import annotations

import threading

import pytest

from rollstream.stages.errors import DataError, PluginError
from rollstream.stages.reward.exact_match import exact_match
from rollstream.stages.reward.format_regex import format_regex
from rollstream.stages.reward.last_number import last_number
from rollstream.stages.reward.length import length
from rollstream.stages.reward.math_verify import math_verify


@pytest.mark.parametrize(
    ("response", "target", "worth"),
    [
        (" 72\n", 72, 1.0),
        ("72", "72", 1.0),
        ("72.", "72", 0.0),
        ("true", True, 1.0),
        ('["a"]', ["a"], 1.0),
        ("", "x", 0.0),
    ],
)
def test_exact_match(response, target, worth):
    assert exact_match(response, target) == worth


def test_exact_match_minds_space_when_told():
    assert exact_match("a ", "a", strip=False) == 0.0


@pytest.mark.parametrize(
    ("response", "target"),
    [
        ("3 and 4 make 7.", 7),
        ("it costs $1,000.50", "1000.5"),
        ("x = -3", -3),
        ("x = −3", "-3"),
        ("3-5", 5),
        ("so .5", "1/2"),
        ("so 2/4", 0.5),
        ("7.0", 7),
        ("2e3", "#### 2,000"),
        ("12345678901234567890123", 12345678901234567890123),
    ],
)
def test_last_number_is_the_target(response, target):
    assert last_number(response, target) == 1.0


@pytest.mark.parametrize("response", ["", "seven", "7 then 8", "1/0", "7" * 5000, "-7"])
def test_last_number_is_not_the_target(response):
    assert last_number(response, 7) == 0.0


@pytest.mark.parametrize("target", ["seven", "", None, True])
def test_a_target_without_number_is_a_data_error(target):
    with pytest.raises(DataError, match="holds no number"):
        last_number("7", target)


@pytest.mark.parametrize(
    ("target", "response", "worth"),
    [
        (3, "3", 1.0),
        ("3", "it is $3$", 1.0),
        ("3", r"x=3", 1.0),
        ("3", r"first \boxed{2} then \boxed{3}", 1.0),
        ("3", r"first \boxed{3} then \boxed{2}", 0.0),
        ("1/2", "0.5", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", 1.0),
        (r"$\frac{1}{2}$", "0.5", 1.0),
        ("x=2", "2", 1.0),
        ("E", r"\boxed{\text{E}}", 1.0),
        (r"\text{E}", r"\boxed{\text{E}}", 1.0),
        ("2^{10}", "1024", 1.0),
        ("3", "", 0.0),
        ("3", "no number", 0.0),
        ("3", r"\boxed{}", 0.0),
    ],
)
def test_math_verify(target, response, worth):
    assert math_verify(response, target) == worth


@pytest.mark.parametrize("target", ["", "  ", "hello world", "Paris", "$", r"\boxed{}"])
def test_a_target_that_is_no_mathematics_is_a_data_error(target):
    with pytest.raises(DataError, match="no mathematics"):
        math_verify("3", target)


def test_math_verify_scores_when_the_stage_runs_in_a_thread(score):
    found = []
    ask = lambda: found.append(score("math_verify", [r"\boxed{\frac{1}{3}}", r"\boxed{3}"], target="1/3")[0])  # noqa: E731
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert found == [[1.0, 0.0]]


def test_math_verify_survives_an_endless_answer(score):
    answers = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{100000000!}", r"\boxed{7}"]
    rewards, _ = score("math_verify", answers, target="7", timeout_s=1.5, params={"step_timeout_s": 1})
    assert rewards == [0.0, 0.0, 1.0]


def test_a_bad_target_is_counted_as_a_data_error(score):
    rewards, stage = score("last_number", ["7"], target="seven", on_error="abstain")
    assert rewards == [None]
    assert stage.metrics.means()["reward/data_errors"] == 1.0


@pytest.mark.parametrize(
    ("response", "full", "worth"),
    [("<a>x</a>", True, 1.0), ("<a>x</a>!", True, 0.0), ("<a>x</a>!", False, 1.0), ("", False, 0.0)],
)
def test_format_regex(response, full, worth):
    assert format_regex(response, "<a>.*</a>", full=full) == worth


def test_a_bad_pattern_is_the_functions_error(score):
    with pytest.raises(PluginError, match="unterminated"):
        score("format_regex", ["a"], params={"pattern": "["})


@pytest.mark.parametrize(("tokens", "worth"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_length(tokens, worth):
    assert length([0] * tokens, max_tokens=100, buffer_tokens=20) == worth


def test_length_refuses_a_buffer_that_does_not_fit():
    with pytest.raises(ValueError, match="buffer_tokens must be from 1 to max_tokens"):
        length([0], max_tokens=10, buffer_tokens=11)
