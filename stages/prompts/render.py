"""A prompt as the data has it -> the text that the model sees -> its token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.stages.errors import DataError

#: What `config.json` calls the longest sequence, by architecture.
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def prompt_fault(prompt: object, *, chat_template: bool) -> str:
    """What is wrong with a prompt: a sentence without its subject, or ""."""
    if isinstance(prompt, str):
        return "" if prompt.strip() else "is empty"
    if prompt is None:
        return "is null"
    if not isinstance(prompt, list):
        return f"must be text or a list of chat messages, got {type(prompt).__name__}"
    if not prompt:
        return "is an empty list of messages"
    if not chat_template:
        return "is a list of chat messages, and chat_template=False takes text only"
    return next((f"message {i}: {f}" for i, m in enumerate(prompt, start=1) if (f := _message_fault(m))), "")


def _message_fault(message: object) -> str:
    if not isinstance(message, dict):
        return f"must be an object with role and content, got {type(message).__name__}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return f"role must be text such as 'user', got {role!r}"
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        return f"content must be text, got {'null' if content is None else type(content).__name__}"
    return ""


def max_model_tokens(model: Path) -> int | None:
    """The longest sequence, in tokens, that `config.json` allows; null where it gives none."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        for key in LENGTH_KEYS:
            if isinstance(part.get(key), int):
                return part[key]
    return None


class Renderer:
    """The tokenizer of a model folder, and the one way from a prompt to text and ids."""

    def __init__(self, model: Path, *, system: str | None, chat_template: bool):
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DataError(f"no tokenizer can be loaded from model folder {str(model)!r}: {error}") from error
        self.system = system
        self.chat_template = chat_template
        if chat_template and not self.tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {str(model)!r} has no chat template: set chat_template=False for text prompts, or "
                "put a chat_template.jinja in the folder"
            )

    @property
    def template(self) -> str:
        """What changes the text of a prompt, as one text."""
        return json.dumps([self.chat_template, self.system, self.chat_template and self.tokenizer.chat_template])

    def text(self, prompt: str | list[dict[str, Any]]) -> str:
        """The text that the model sees, ready for its answer. Raises ValueError if the template refuses it."""
        import jinja2

        if not self.chat_template:
            assert isinstance(prompt, str)
            return prompt
        messages = prompt
        if isinstance(messages, str):
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            messages = [*system, {"role": "user", "content": messages}]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. A template writes the special tokens itself; plain text gets the tokenizer's own."""
        if self.chat_template:
            return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        begin = self.tokenizer.bos_token
        return [
            self.tokenizer(text, add_special_tokens=not (begin and text.startswith(begin)))["input_ids"]
            for text in texts
        ]
