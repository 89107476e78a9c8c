"""New weights read from the update stage's buffer: whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small_engines import greedy, requests, weights

from rollstream.stages.megatron.weight_buffer import WeightBuffer

pytestmark = pytest.mark.vllm


class Sender:
    """An update stage's buffer, filled from one folder or another."""

    def __init__(self) -> None:
        self.folder = ""
        self.buffer = WeightBuffer(self._tensors, torch.device("cpu"))

    def put(self, folder: str, version: int):
        self.folder = folder
        return self.buffer.put(version)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, array in weights(self.folder):
            yield name, torch.from_numpy(array)


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.buffer.close()


@pytest.mark.parametrize("updates", ["between", "resume", "recompute", "keep"])
def test_an_updated_engine_says_what_a_fresh_one_says(engine, folders, fresh, sender, updates):
    engine.updates = updates
    before = greedy(engine)
    assert engine.load_shared_weights(sender.put(folders["b"], 7))
    assert (greedy(engine), engine.version) == (fresh, 7)
    assert engine.load_shared_weights(sender.put(folders["a"], 8))
    assert greedy(engine) == before


def test_nothing_is_sampled_from_weights_that_others_took_the_place_of(engine, folders, fresh, sender):
    """They are overwritten before they are read, and while they are; requests under way and new ones wait."""
    old = sender.put(folders["a"], 1)
    newer = sender.put(folders["b"], 2)
    long = requests("a", n=2, tag="under way", max_tokens=200)[0]
    engine.submit(long)
    assert not engine.load_shared_weights(old)
    engine.submit(requests("b", n=1, tag="waits")[0])
    assert engine.finished(1.0) is None
    assert engine.load_shared_weights(newer)
    samples = dict(engine.finished(60.0) for _ in range(2))
    assert {*samples["b"][0].versions.tolist()} == {2}
    assert all({*s.versions.tolist()} <= {0, 2} for s in samples["a"])
    assert greedy(engine) == fresh


def test_weights_whose_process_has_ended_are_not_there(engine, folders, sender):
    sent = sender.put(folders["b"], 1)
    sender.buffer.close()
    assert not engine.load_shared_weights(sent)
    engine.load_weights(2, weights(folders["a"]))  # by another way
    assert engine.version == 2


def test_a_new_process_of_the_sender_has_a_buffer_of_its_own(engine, folders, fresh, sender):
    other = Sender()
    assert engine.load_shared_weights(sender.put(folders["a"], 1))
    assert engine.load_shared_weights(other.put(folders["b"], 2))
    other.buffer.close()
    assert greedy(engine) == fresh
