"""How a rollout function is found, checked and shipped, and how the stage runs it."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from rollstream.stages.base import World
from rollstream.stages.errors import ConfigError, PluginError
from rollstream.stages.rollout import Rollout, Trajectory
from rollstream.stages.rollout.function import ship
from rollstream.stages.schema import Prompted

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tiny_model


async def turns(engine, prompt, tools):
    trajectory = Trajectory(prompt)
    while not trajectory.done:
        engine.say(trajectory, tools and await tools["shout"](await engine.turn(trajectory)))
    return trajectory


async def swapped(prompt, engine, tool):
    return Trajectory(prompt)


def plain(engine, prompt, tools): ...


class Callable:
    async def __call__(self, *, prompt, **others): ...


def shout(text: str) -> str:
    return text.upper() + "!"


@pytest.mark.parametrize("function", [turns, Callable(), functools.partial(turns), functools.partial(Callable(), x=1)])
def test_any_kind_of_async_function_is_taken(function):
    loaded, tools = ship(function, {"shout": shout}).load()
    assert callable(loaded)
    assert tools["shout"]("a") == "A!"


def test_a_function_is_named_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "my_rollouts.py").write_text("async def chat(engine, prompt, tools): ...\nlimit = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ship("my_rollouts:chat", {}).name == "my_rollouts:chat"
    with pytest.raises(ConfigError, match=r"has no 'chatt': did you mean 'chat'\?"):
        ship("my_rollouts:chatt", {})
    with pytest.raises(ConfigError, match="'my_rollouts:limit' must be callable, got int"):
        ship("my_rollouts:limit", {})
    with pytest.raises(ConfigError, match="rollout function 'chat' must be written"):
        ship("chat", {})


def test_all_that_is_wrong_is_listed():
    with pytest.raises(ConfigError) as error:
        ship(plain, {"a": 3, 4: shout})
    text = str(error.value)
    assert len(error.value.faults) == 3
    assert "plain' must be written `async def`" in text
    assert "tool 'a' must be callable, got int" in text
    assert "names of tools must be text, got 4" in text


def test_arguments_are_checked_by_name():
    with pytest.raises(ConfigError, match=r"must take \(engine, prompt, tools\).*it takes \(prompt, engine, tool\)"):
        ship(swapped, {})


def test_what_cannot_be_shipped_is_refused_with_the_reason():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"(?s)can't be sent to the process.*lock"):
        ship(turns, {"held": lambda text: lock})


def test_tools_without_a_function_and_limits_of_nothing_are_refused():
    with pytest.raises(ConfigError) as error:
        Rollout.Config(model="m", max_tokens=4, tools={"a": shout}, max_turns=0, max_turn_tokens=0, turn_timeout_s=0)
    assert len(error.value.faults) == 4
    assert "tools a are called by a rollout function: set function" in str(error.value)


def test_function_and_tools_travel_without_their_module(tmp_path, monkeypatch, model):
    (tmp_path / "my_chat.py").write_text(
        "async def chat(engine, prompt, tools):\n    raise ValueError(tools['shout'].__name__)\ndef shout(text): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_chat

    config = Rollout.Config(model=model, n=1, max_tokens=8, function=my_chat.chat, tools={"shout": my_chat.shout})
    shipped = pickle.dumps(Rollout(config))
    monkeypatch.undo()
    del sys.modules["my_chat"]
    stage = pickle.loads(shipped)
    assert stage.settings()["function"] == "my_chat:chat"
    assert stage.settings()["tools"] == ("shout",)
    stage.setup(World(threads=1))
    with pytest.raises(PluginError, match=r"my_chat.py\", line 2, in chat"):
        list(stage.run([prompt()]))
    stage.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model.write_model(tmp_path_factory.mktemp("model")))


def prompt(order: int = 0) -> pa.RecordBatch:
    row = {"group_id": f"r{order}.e0", "order": order, "prompt": "1+2=", "prompt_ids": [20, 30 + order]}
    return pa.RecordBatch.from_pylist([row | {"target": '"3"', "meta": "{}"}], schema=Prompted.arrow())


@pytest.fixture
def stage(model):
    given = {"max_tokens": 80, "function": turns, "tools": {"shout": shout}, "max_turns": 2, "max_turn_tokens": 5}
    stage = Rollout(Rollout.Config(model=model, n=3, **given))
    stage.setup(World(threads=1))
    yield stage
    stage.close()


def test_rows_hold_turns_and_what_was_said(stage):
    stage.load_weights(5, weights(stage.config.model))
    groups = list(stage.run([prompt(0), prompt(1)]))
    for row in (row for group in groups for row in group.to_pylist()):
        mask = row["loss_mask"]
        assert 2 <= sum(mask) <= 10
        assert len(mask) - sum(mask) >= 2
        assert all((p == 0.0) != sampled for p, sampled in zip(row["rollout_logprobs"], mask, strict=True))
        assert row["weight_version"] == [5] * len(mask)
        assert row["response"].count("!") >= 2
    sums = stage.metrics.take()
    rows = [row for group in groups for row in group.to_pylist()]
    assert sums["rollout/response_tokens"] == (sum(sum(row["loss_mask"]) for row in rows), 6)
    assert sums["rollout/turns"] == (12, 6)


def test_logprobs_of_every_turn_equal_a_full_forward_pass(stage):
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(stage.config.model)
    for row in next(stage.run([prompt()])).to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            scores = net(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        found = scores.gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]
        mask = torch.tensor(row["loss_mask"])
        torch.testing.assert_close(torch.tensor(row["rollout_logprobs"])[mask], found[mask], atol=1e-5, rtol=0)


def test_one_turn_is_what_the_stage_draws_without_a_function(model):
    async def once(engine, prompt, tools):
        trajectory = Trajectory(prompt)
        await engine.turn(trajectory)
        return trajectory

    def drawn(**settings):
        stage = Rollout(Rollout.Config(model=model, n=3, max_tokens=9, **settings))
        stage.setup(World(threads=1))
        found = next(stage.run([prompt()])).to_pydict()
        stage.close()
        return found["response_ids"], found["finish_reason"]

    assert drawn(function=once) == drawn()


def weights(folder: str):
    from safetensors.numpy import load_file

    return list(load_file(Path(folder) / "model.safetensors").items())
