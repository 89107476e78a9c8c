"""Tiny models for vLLM, engines on them, and what transformers says of the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rollstream.stages.rollout.engine import Request, Sample, Sampling, generate

VOCABULARY, CONTEXT, EOS = 64, 256, 1
PROMPTS = {"a": [5, 6, 7, 8, 9, 10], "b": [20], "c": [11, 3, 40], "d": [2] * 40}


def save_model(folder: Path, *, seed: int, tied: bool) -> str:
    """A random Llama of two layers, sharp enough to have likely tokens. vLLM's CPU kernels want heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_engine(folder: str, **settings):
    from rollstream.stages.rollout.vllm_engine import VllmEngine

    given = {"updates": "resume", "timeout_s": 30.0, "check_weights": False, "args": {}}
    given["sampling"] = Sampling(max_tokens=8)
    return VllmEngine(folder, dtype="float32", stage="rollout", **given | settings)


def weights(folder: str) -> list[tuple[str, np.ndarray]]:
    from safetensors.numpy import load_file

    return list(load_file(Path(folder) / "model.safetensors").items())


def requests(names: str = "abcd", n: int = 3, tag: str = "", **settings) -> list[Request]:
    sampling = Sampling(**{"max_tokens": 24} | settings)
    return [
        Request(request_id=g, prompt_ids=PROMPTS[g], sample_ids=[f"{tag}{g}.{i}" for i in range(n)], sampling=sampling)
        for g in names
    ]


def draw(engine, names: str = "abcd", n: int = 3, tag: str = "", **settings) -> dict[str, list[Sample]]:
    """Samples by group."""
    return dict(generate(engine, requests(names, n, tag, **settings), timeout_s=60))


def greedy(engine) -> dict[str, list[int]]:
    return {g: s[0].response_ids.tolist() for g, s in draw(engine, n=1, temperature=0.0, max_tokens=40).items()}


def logprobs_of(folder: str, prompt: list[int], response: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of a response by one forward pass of transformers over prompt and response, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
