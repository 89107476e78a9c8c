"""Fixtures: a tiny model folder, groups to score, a reward that ends with its test, recordings, edges."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray

from rollstream.graphs import edge_actor
from rollstream.graphs.edge import EdgeQueue
from rollstream.graphs.edge_actor import EdgeActor, EdgeSettings
from rollstream.graphs.item import Item, Part
from rollstream.graphs.recording import Recorder
from rollstream.stages.reward import Reward
from rollstream.stages.schema import Schema

sys.path.insert(0, str(Path(__file__).parent))  # for edge_toys, small_world
import edge_toys


@pytest.fixture(autouse=True)
def without_ray():
    """A call to Ray that no test stands in for starts a cluster by itself, which later tests trip over."""
    yield
    assert not ray.is_initialized(), "this test has started Ray"


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls is defined %}[tools]{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a byte-level tokenizer (one token a byte) that adds `<s>`, a chat template, and a config.json
    with 256 positions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256, "model_type": "llama"}))
    return folder


@pytest.fixture
def rollouts():
    """Makes a group as a reward sees it, a row for each response; columns that it does not read are left out."""

    def make(responses: list[str], target: object = "yes", meta: object = None) -> pa.RecordBatch:
        rows = range(len(responses))
        return pa.RecordBatch.from_pydict(
            {
                "sample_id": [f"r000001.e0.{i}" for i in rows],
                "response": responses,
                "target": [json.dumps(target)] * len(responses),
                "meta": [json.dumps(meta or {})] * len(responses),
                "response_ids": pa.array([list(range(len(r))) for r in responses], pa.list_(pa.int32())),
            }
        )

    return make


@pytest.fixture
def score(rollouts: Any):
    """Scores responses with a function: gives the rewards and the stage, whose worker ends with the test."""
    stages: list[Reward] = []

    def run(function: Any, responses: list[str], *, target: object = "yes", meta: object = None, **settings: Any):
        stage = Reward(Reward.Config(function=function, **settings))
        stages.append(stage)
        return stage.process(rollouts(responses, target, meta))["reward"].to_pylist(), stage

    yield run
    for stage in stages:
        stage.close()


@pytest.fixture
def recorded(tmp_path: Path):
    """Records groups of two rows behind a stage, as its edge does: every column of `schema` but those `without`."""

    def make(
        stage: str,
        schema: type[Schema],
        orders: Any = (0, 1, 2),
        *,
        run: str = "a",
        without: str = "",
        **metrics: float,
    ) -> str:
        path = tmp_path / f"{run}-{stage}.arrows"
        recorder = Recorder(path, {"graph": "g", "edge": stage})
        for order in orders:
            given = {"group_id": [f"g{order}"] * 2, "order": [order] * 2, "sample_id": [f"g{order}.0", f"g{order}.1"]}
            columns = {
                name: pa.array(given.get(name, [None] * 2), kind)
                for name, kind in schema.columns.items()
                if name != without
            }
            head = Item(
                group_id=f"g{order}",
                order=order,
                version=9,
                birth=f"{run}{order}",
                num_rows=2,
                parts=(Part(edge=stage, nbytes=1),),
                metrics={name.replace("_", "/"): (value, 1.0) for name, value in metrics.items()},
            )
            recorder.add(head.to_json(), pa.RecordBatch.from_pydict(columns))
        recorder.close()
        return str(path)

    return make


@pytest.fixture
def clock() -> edge_toys.Clock:
    return edge_toys.Clock()


@pytest.fixture
def queue(clock: edge_toys.Clock):
    """Makes a queue that holds groups g0, g1 ... of ten bytes each."""

    def make(consumers: tuple[str, ...] = ("b",), *, holds: int = 0, **bounds: float) -> EdgeQueue:
        limits = {"max_groups": 8, "max_bytes": 1000, "lease_s": 60.0} | bounds
        made = EdgeQueue("a -> b", consumers, clock=clock, **limits)
        for order in range(holds):
            made.put(edge_toys.item(order))
        return made

    return make


@pytest.fixture
def edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an edge without Ray that is open, or one that is as new with `begun=False`; again, as Ray does after its
    death. A reference is a future, or the value itself where the edge puts it."""
    monkeypatch.setattr(edge_actor, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr(edge_actor, "fetch", lambda item, edges: edge_toys.ROWS)

    def make(*, begun: bool = True, **settings: Any) -> EdgeActor:
        given: dict[str, Any] = {"num_producers": 1, "max_groups": 8, "max_bytes": 1000, "lease_s": 60.0, "needed": 1}
        given |= {"consumers": ("b",), "max_deaths": 2, "folder": tmp_path}
        made = EdgeActor(EdgeSettings(**{"name": "a -> b", "producer": "a", **given, **settings}))
        if begun:
            edge_toys.run(made, lambda: made.begin({}, (0, ()), 9))
            edge_toys.run(made, made.open)
        return made

    return make
