"""What a model's folder says of the tokens that it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.stages.errors import StageError
from rollstream.stages.rollout.engine import Request


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Of one model: ids from 0 to `vocabulary` - 1, at most `context` tokens in all where that is bounded, and the
    tokens that end a response."""

    vocabulary: int
    context: int | None
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, folder: str | Path, *, context: int | None = None) -> ModelLimits:
        """Of the model in a folder; `context` is the engine's own bound, where it has one. End-of-sequence tokens are
        those of the generation settings, or else the model's."""
        config = _read(Path(folder) / "config.json")
        text = config.get("text_config", config)
        bounds = [b for b in (context, text.get("max_position_embeddings")) if b is not None]
        found = _read(Path(folder) / "generation_config.json").get("eos_token_id")
        found = text.get("eos_token_id", config.get("eos_token_id")) if found is None else found
        return cls(
            vocabulary=text["vocab_size"],
            context=min(bounds, default=None),
            eos_ids=frozenset([] if found is None else [found] if isinstance(found, int) else found),
        )

    def budget(self, request: Request, stage: str) -> int:
        """Tokens that a response may have; raises StageError for a prompt that the model cannot take."""
        ids, limit, most = request.prompt_ids, self.context, request.sampling.max_tokens
        bad = [i for i in ids if not 0 <= i < self.vocabulary]
        if not len(ids):
            fault = "A prompt must have at least one token, got none."
        elif bad:
            fault = (
                f"Prompt token ids must be from 0 to {self.vocabulary - 1}, got {bad[:5]}: is it another tokenizer's?"
            )
        elif limit is not None and len(ids) >= limit:
            fault = f"A prompt must be shorter than the model's context of {limit} tokens, got {len(ids)}."
        else:
            return most if limit is None else min(most, limit - len(ids))
        raise StageError(stage, f"group {request.request_id}", fault)


def _read(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
