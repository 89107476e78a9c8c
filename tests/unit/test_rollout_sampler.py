from __future__ import annotations

import pytest
import torch

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.engine import Sampling
from rollstream.stages.rollout.sampler import Sampler

LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0, 0.0])
NO_IDS = torch.zeros((1, 0), dtype=torch.long)


def drawn(num_samples: int, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs of one step from LOGITS, [num_samples]."""
    ids = [f"g.{i}" for i in range(num_samples)]
    sampler = Sampler(
        ids, Sampling(max_tokens=1, **settings), max_tokens=1, stage="rollout", device=torch.device("cpu")
    )
    scores = sampler(NO_IDS, LOGITS.repeat(num_samples, 1))
    tokens, logprobs = sampler.result()
    assert torch.equal(scores.argmax(dim=1), tokens[:, 0])
    return tokens[:, 0], logprobs[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature):
    tokens, _ = drawn(20_000, temperature=temperature)
    expected = 20_000 * (LOGITS / temperature).softmax(0)
    chi_square = ((torch.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 99.9 % quantile at 5 degrees of freedom


@pytest.mark.parametrize(("settings", "kept"), [({"top_k": 2}, [0, 3]), ({"top_p": 0.8}, [0, 2, 3])])
def test_filters_leave_the_likeliest_tokens_in_proportion(settings, kept):
    tokens, _ = drawn(5_000, **settings)
    expected = 5_000 * LOGITS[kept].softmax(0)
    counts = torch.bincount(tokens, minlength=6)
    assert counts.nonzero()[:, 0].tolist() == kept
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 13.8  # 99.9 % quantile at 2 degrees of freedom


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 2}, {"temperature": 1.5, "top_p": 0.6}])
def test_logprobs_are_of_the_whole_tempered_distribution(settings):
    tokens, logprobs = drawn(200, **settings)
    expected = (LOGITS / settings.get("temperature", 1.0)).log_softmax(0)[tokens]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def test_temperature_zero_takes_the_likeliest_token_with_its_plain_logprob():
    tokens, logprobs = drawn(3, temperature=0.0)
    assert tokens.tolist() == [3, 3, 3]
    assert logprobs.tolist() == pytest.approx([LOGITS.log_softmax(0)[3].item()] * 3)


def test_tokens_without_probability_are_never_drawn():
    sampler = Sampler(
        [str(i) for i in range(2_000)], Sampling(max_tokens=1), max_tokens=1, stage="s", device=torch.device("cpu")
    )
    ninf = float("-inf")
    sampler(NO_IDS, torch.tensor([ninf, 0.0, ninf, 1.0, ninf]).repeat(2_000, 1))
    assert set(sampler.result()[0][:, 0].tolist()) == {1, 3}


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_sample(broken):
    sampler = Sampler(["g7.0", "g7.1"], Sampling(max_tokens=1), max_tokens=1, stage="s", device=torch.device("cpu"))
    scores = torch.zeros((2, 4))
    scores[1, 2] = broken
    with pytest.raises(StageError, match="hold NaN or infinity") as error:
        sampler(NO_IDS, scores)
    assert error.value.subject == "g7.1"
