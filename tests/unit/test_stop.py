"""Signals are raised in this process; the handler that is there before the test stands for Ray's."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rollstream.graphs.stop import GRACE_S, StopFlag, step_grace_s


class Before(Exception):
    """Raised by the handler that was there before."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def raise_before(*_: object) -> None:
        raise Before

    old = {number: signal.signal(number, raise_before) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_taken_down(number):
    with StopFlag() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number


def test_the_second_signal_goes_to_the_handler_before():
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Before):
            signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGTERM


def test_afterwards_the_handlers_before_are_back():
    with StopFlag():
        pass
    with pytest.raises(Before):
        signal.raise_signal(signal.SIGTERM)


def test_it_ends_as_a_process_does_that_the_signal_ends():
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        with StopFlag() as stop:
            signal.raise_signal(number)
        with pytest.raises(kind) as ended:
            stop.exit()
    assert ended.value.code == 128 + 15


def test_without_a_signal_the_process_goes_on():
    with StopFlag() as stop:
        pass
    assert stop.exit() is None


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, GRACE_S),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "100"}, GRACE_S),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 1.2),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "30"}, 12.0),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "1000"}, GRACE_S),
    ],
)
def test_a_step_in_a_job_may_take_its_share_of_the_jobs_grace(environment, seconds):
    assert step_grace_s(environment) == pytest.approx(seconds)
