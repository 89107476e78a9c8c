"""How a reward function is found and shipped."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollstream.stages.errors import ConfigError
from rollstream.stages.reward import Reward, reward
from rollstream.stages.reward.resolve import known_rewards, resolve


def make(function, **settings):
    return Reward(Reward.Config(function=function, **settings))


def test_the_decorator_gives_the_function_back_and_names_it():
    def starts(response, target):
        return 1.0

    assert reward(name="test_starts")(starts) is starts
    assert resolve("test_starts").function is starts
    assert "test_starts" in known_rewards()


def test_a_name_belongs_to_one_function():
    reward(name="test_taken")(lambda response: 1.0)

    def other(response):
        return 0.0

    with pytest.raises(ConfigError, match="'test_taken' is taken by"):
        reward(name="test_taken")(other)


def test_a_name_of_an_installed_package_is_not_shadowed():
    def length(response):
        return 1.0

    from rollstream.stages.reward import plugin

    plugin._registered.pop("length", None)
    reward(length)
    try:
        with pytest.raises(ConfigError, match="'length' has several owners"):
            make("length")
    finally:
        plugin._registered.pop("length")


def test_known_names_are_listed_without_importing_the_plugins():
    code = (
        "import sys; from rollstream.stages.reward.resolve import known_rewards; print(*known_rewards());"
        "print({'torch', 'transformers', 'math_verify', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["exact_match format_regex last_number length math_verify", "set()"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exact_mach", "did you mean 'exact_match'?"),
        ("no.such.module:f", "No module named 'no'"),
        ("json:lods", "did you mean 'loads'?"),
        ("json:__doc__", "must be callable"),
        ("json:", "must be written pkg.mod:fn"),
        (7, "must be a function or a name, got int"),
    ],
)
def test_a_function_that_is_not_there_is_told_with_those_that_are(name, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        make(name)


def test_a_function_as_the_stages_argument_is_refused():
    with pytest.raises(ConfigError, match=r"write Reward\(Reward\.Config\(\.\.\.\)\)"):
        Reward(test_a_name_belongs_to_one_function)


@pytest.mark.parametrize(
    ("function", "params", "said"),
    [
        (lambda answer: 1.0, {}, "argument 'answer' is not known: a function may take response, target, prompt"),
        (lambda response, /: 1.0, {}, "positional-only"),
        (lambda response: 1.0, {"target": 1}, "is an argument of each sample"),
        (lambda response, scale=1: 1.0, {"scle": 1}, "does not take; it takes response, scale"),
        ("format_regex", {}, r"params=\{'pattern': \.\.\.\}"),
    ],
)
def test_arguments_are_checked_when_the_stage_is_made(function, params, said):
    with pytest.raises(ConfigError, match=said):
        make(function, params=params)


def module_function(response):
    return 1.0


class Scorer:
    def __init__(self, worth):
        self.worth = worth

    def __call__(self, response):
        return self.worth

    def method(self, response):
        return self.worth


def closure():
    worth = 1.0
    return lambda response: worth


def partial():
    return functools.partial(lambda response, worth: worth, worth=1.0)


@pytest.mark.parametrize("function", [module_function, Scorer(1.0), Scorer(1.0).method, closure(), partial()])
def test_any_kind_of_function_can_be_shipped(score, function):
    assert score(function, ["a"])[0] == [1.0]


def test_what_cannot_be_shipped_is_refused_with_the_reason():
    lock = threading.Lock()

    def locked(response):
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"can't be sent .*cannot pickle '_thread.lock'"):
        make(locked)


@pytest.fixture
def user_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of the user's with a helper beside it; `forget` makes both unimportable."""
    (tmp_path / "my_helper.py").write_text("class Table:\n    worth = 2.0\n\ndef look_up(r):\n    return Table.worth\n")
    (tmp_path / "my_reward.py").write_text(
        "import my_helper\nfrom my_helper import look_up\n\n"
        "def score(response):\n    return look_up(response) + my_helper.Table.worth\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        monkeypatch.undo()
        for name in ("my_reward", "my_helper"):
            (tmp_path / f"{name}.py").unlink(missing_ok=True)
            sys.modules.pop(name, None)

    yield forget
    forget()


def test_a_script_travels_with_the_helpers_beside_it(user_script, rollouts):
    stages = [make("my_reward:score"), make("my_reward:score", on_error="abstain")]
    shipped = [pickle.dumps(stage) for stage in stages]
    user_script()
    for text in shipped:
        stage = pickle.loads(text)
        assert stage.process(rollouts(["a"]))["reward"].to_pylist() == [4.0]
        stage.close()


def test_a_stage_made_of_a_function_can_travel(user_script):
    import my_reward  # type: ignore[import-not-found]

    shipped = pickle.dumps(make(my_reward.score))
    user_script()
    stage = pickle.loads(shipped)
    assert stage.settings()["function"] == "my_reward:score"
