"""New weights in vLLM, between requests and in flight: as good as an engine that was loaded with them."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
from small_engines import PROMPTS, draw, greedy, logprobs_of, requests, weights

from rollstream.stages.rollout import vllm_engine
from rollstream.stages.rollout.engine import Sample
from rollstream.stages.rollout.weight_files import files_of

pytestmark = pytest.mark.vllm

UPDATES = ("between", "resume", "recompute", "keep")


@pytest.mark.parametrize("updates", UPDATES)
def test_an_updated_engine_says_what_a_fresh_one_says(engine, folders, fresh, updates):
    engine.updates = updates
    before = greedy(engine)
    assert before != fresh
    engine.load_weights(7, weights(folders["b"]))
    assert greedy(engine) == fresh
    engine.load_weights(8, weights(folders["a"]))
    assert greedy(engine) == before


def cut_by_weights(engine, tensors, tag: str) -> list[tuple[str, Sample]]:
    """Long samples, of which these were drawn with old weights in part: new ones come as soon as a short one, begun
    with the long ones, has ended."""
    given = requests("abcd", n=8, max_tokens=200, tag=tag)
    few_tokens = dataclasses.replace(given[0].sampling, max_tokens=4)
    short = dataclasses.replace(given[0], request_id="short", sample_ids=[f"{tag}.short"], sampling=few_tokens)
    for request in [*given, short]:
        engine.submit(request)
    assert engine.finished(60.0)[0] == "short"
    engine.load_weights(1, tensors)
    samples = dict(engine.finished(60.0) for _ in given)
    return [(g, s) for g, group in samples.items() for s in group if len(set(s.versions.tolist())) == 2]


@pytest.mark.parametrize("updates", ["resume", "recompute"])
def test_each_token_has_the_logprob_of_the_version_that_it_says(engine, folders, updates):
    """Weights change while long samples are under way; those that were cut in two agree with both models."""
    engine.updates = updates
    cut = cut_by_weights(engine, weights(folders["b"]), tag=updates)
    assert cut, "the weights came before the first or after the last token: no sample was cut"
    for group_id, sample in cut:
        assert (np.diff(sample.versions) >= 0).all()
        for version, name in enumerate("ab"):
            own = sample.versions == version
            expected = logprobs_of(folders[name], PROMPTS[group_id], sample.response_ids)
            np.testing.assert_allclose(sample.logprobs[own], expected[own], atol=1e-5)


def test_a_kept_past_is_of_the_old_weights(engine, folders):
    """Otherwise "keep" would be "recompute" under another name."""
    engine.updates = "keep"
    cut = cut_by_weights(engine, weights(folders["b"]), tag="keep")
    worst = {0: 0.0, 1: 0.0}
    for group_id, sample in cut:
        for version, name in enumerate("ab"):
            expected = logprobs_of(folders[name], PROMPTS[group_id], sample.response_ids)
            own = sample.versions == version
            worst[version] = max(worst[version], np.abs(sample.logprobs - expected)[own].max())
    assert worst[0] < 1e-5 < 1e-2 < worst[1]


def test_a_prefix_of_old_weights_is_not_used_again(engine, folders):
    """The same long prompt, before and after, with the cache kept."""
    engine.updates = "keep"
    draw(engine, "d", n=2, tag="old")
    engine.load_weights(1, weights(folders["b"]))
    for sample in draw(engine, "d", n=2, tag="new")["d"]:
        expected = logprobs_of(folders["b"], PROMPTS["d"], sample.response_ids)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_requests_that_come_during_an_update_use_the_new_weights(engine, folders, monkeypatch):
    under_way = threading.Event()

    def slowly(tensors, folder):
        for path in files_of(tensors, folder):
            yield path
            under_way.set()
            time.sleep(1.0)

    monkeypatch.setattr(vllm_engine, "files_of", slowly)
    loading = threading.Thread(target=engine.load_weights, args=(1, weights(folders["b"])))
    loading.start()
    assert under_way.wait(30)
    for sample in draw(engine, "a", n=2, tag="during")["a"]:
        assert set(sample.versions.tolist()) == {1}
    loading.join(timeout=30)
