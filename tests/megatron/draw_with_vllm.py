"""Draws with vLLM in a process of its own: `draw_with_vllm.py MODEL NEW_WEIGHTS MAX_TOKENS PROMPTS OUT`.

Samples at two temperatures with the weights of MODEL, samples under way while those of NEW_WEIGHTS come, and samples
after that. PROMPTS are lists of ids as JSON. OUT gets the samples as JSON: {temperature, prompt_ids, response_ids,
logprobs, versions} each.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path


def main(model: str, new_weights: str, max_tokens: str, given: str, out: str) -> None:
    from safetensors.numpy import load_file

    from rollstream.stages.rollout.engine import Request, Sampling, generate
    from rollstream.stages.rollout.vllm_engine import VllmEngine

    prompts = json.loads(given)
    sampling = Sampling(max_tokens=int(max_tokens))
    engine = VllmEngine(
        model,
        dtype="float32",
        stage="rollout",
        sampling=sampling,
        updates="resume",
        timeout_s=60.0,
        check_weights=True,
        args={},
    )
    rows: list[dict] = []

    def requests(tag: str, temperature: float) -> list[Request]:
        chosen = Sampling(max_tokens=int(max_tokens), temperature=temperature)
        return [
            Request(
                request_id=f"{tag}{k}", prompt_ids=ids, sample_ids=[f"{tag}{k}.{i}" for i in range(4)], sampling=chosen
            )
            for k, ids in enumerate(prompts)
        ]

    def keep(temperature: float, samples) -> None:
        for request_id, group in samples:
            rows.extend(
                {
                    "temperature": temperature,
                    "prompt_ids": prompts[int(request_id[-1])],
                    "response_ids": s.response_ids.tolist(),
                    "logprobs": s.logprobs.tolist(),
                    "versions": s.versions.tolist(),
                }
                for s in group
            )

    for temperature in (1.0, 0.7):
        keep(temperature, generate(engine, requests("before", temperature)))
    begun = requests("during", 0.7)
    few_tokens = dataclasses.replace(begun[0].sampling, max_tokens=2)
    for request in [
        *begun,
        dataclasses.replace(begun[0], request_id="short", sample_ids=["short"], sampling=few_tokens),
    ]:
        engine.submit(request)
    assert engine.finished(120.0)[0] == "short"  # so that the others are under way
    engine.load_weights(1, load_file(Path(new_weights) / "model.safetensors").items())
    keep(0.7, [engine.finished(120.0) for _ in begun])
    for temperature in (1.0, 0.7):
        keep(temperature, generate(engine, requests("after", temperature)))
    engine.close()
    Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
