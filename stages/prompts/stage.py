"""The source of a run's groups.

file --RowStore--> rows on disk --survey--> faults, kept rows     once, on the driver
position --epoch_order--> row --Renderer--> one group             on demand, in the stage's process
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollstream.stages.base import Source, World
from rollstream.stages.errors import ConfigError, DataError
from rollstream.stages.names import known_names
from rollstream.stages.prompts.order import epoch_order
from rollstream.stages.prompts.render import Renderer, max_model_tokens
from rollstream.stages.prompts.store import Record, RowStore
from rollstream.stages.prompts.survey import Survey, survey
from rollstream.stages.schema import Prompted

TOO_LONG = ("error", "skip")


class Prompts(Source[Prompted]):
    """Prompts of a file, each row once an epoch, in an order that the seed fixes.

    A row of the file is a group, whatever its text: row 12 in the first epoch is group `r000012.e0`. The group at
    position p of the run is `p % rows` in the order of epoch `p // rows`, so that a run resumes at any position.

    >>> prompts = Prompts(Prompts.Config(path="train.jsonl", model="models/small"))  # doctest: +SKIP
    >>> [g.column("group_id")[0].as_py() for g in itertools.islice(prompts.rows(frozenset(), 0), 2)]  # doctest: +SKIP
    ['r000003.e0', 'r000001.e0']
    """

    config: Config

    @dataclass(frozen=True, kw_only=True)
    class Config(Source.Config):
        """Which prompts, and how they become tokens."""

        #: A .jsonl or .parquet file, a folder of .parquet files, or a folder written by datasets' save_to_disk.
        path: str
        #: Folder with the model's tokenizer and config.json.
        model: str
        #: Column with text, or with a list of chat messages (role, content).
        prompt: str = "prompt"
        #: Column that the reward gets as `target`, of any type.
        answer: str = "answer"
        #: System message put before prompts that are text; null for none.
        system: str | None = None
        #: True: text is wrapped as a user message in the chat template; false: text is tokenised as it is.
        chat_template: bool = True
        #: Longest prompt in tokens; null: one less than the model's longest sequence.
        max_prompt_tokens: int | None = None
        #: What happens with a longer prompt: "error" reports its row, "skip" leaves it out.
        too_long: str = "error"
        #: False: the order of the file in every epoch.
        shuffle: bool = True
        #: Seed of the order.
        seed: int = 0
        #: Passes over the data; null: without end.
        epochs: int | None = None

        def __post_init__(self) -> None:
            faults: list[str] = []
            for name in ("path", "model", "prompt", "answer"):
                if not getattr(self, name):
                    faults.append(f"{name} must not be empty")
            if self.prompt == self.answer:
                faults.append(f"prompt and answer must be two columns, both are {self.prompt!r}")
            if self.system is not None and not self.chat_template:
                faults.append("system needs chat_template=True: without a template there is no system message")
            if self.too_long not in TOO_LONG:
                faults.append(f"too_long {self.too_long!r} is not known: {known_names(self.too_long, TOO_LONG)}")
            for name in ("max_prompt_tokens", "epochs"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    faults.append(f"{name} must be at least 1 or None, got {value}")
            if self.seed < 0:
                faults.append(f"seed must be at least 0, got {self.seed}")
            if faults:
                raise ConfigError(faults)

    def __init__(self, config: Config, *, name: str | None = None):
        super().__init__(config, name=name)
        self._store: RowStore | None = None
        self._renderer: Renderer | None = None
        self._survey: Survey | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The survey travels, the open file and the tokenizer do not."""
        return self.__dict__ | {"_store": None, "_renderer": None}

    def faults(self) -> list[str]:
        """Everything wrong with the file, its columns, its rows and the model folder. Reads and tokenises all rows."""
        try:
            return self._surveyed().faults
        except DataError as error:
            return error.faults

    def setup(self, world: World) -> None:
        self._checked()
        self._rows()
        self._render()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = self._renderer = None

    def __len__(self) -> int:
        """Groups in an epoch. Raises DataError if the data are wrong."""
        return len(self._checked().kept)

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is used. Raises DataError if the data are wrong."""
        return self._checked().longest

    def max_model_tokens(self) -> int | None:
        """Tokens that prompt and response may have together, by the model's config.json; null where it gives none."""
        path = Path(self.config.model) / "config.json"
        if not path.is_file():
            raise DataError(f"model folder {self.config.model!r} must hold a config.json; {str(path)!r} does not exist")
        try:
            return max_model_tokens(path.parent)
        except ValueError as error:
            raise DataError(f"{str(path)!r} is not valid JSON: {error}") from error

    def rows(self, skip: frozenset[int], start: int) -> Iterator[pa.RecordBatch]:
        kept, config = self._checked().kept, self.config
        store, renderer = self._rows(), self._render()
        end = None if config.epochs is None else config.epochs * len(kept)
        order, order_epoch, position = np.array([], np.int64), -1, start
        while end is None or position < end:
            epoch, place = divmod(position, len(kept))
            if epoch != order_epoch:
                order = epoch_order(len(kept), seed=config.seed, epoch=epoch, shuffle=config.shuffle)
                order_epoch = epoch
            if position not in skip:
                yield _group(store[int(kept[order[place]])], renderer, epoch=epoch, position=position)
            position += 1

    def fingerprint(self) -> str:
        """SHA-256 of the rows that are used, their order, and all that changes their text; not of the path."""
        found, config = self._checked(), self.config
        digest = hashlib.sha256(found.kept.tobytes())
        parts = [found.digest, config.prompt, config.answer, config.shuffle, config.seed, self._render().template]
        digest.update(json.dumps(parts).encode())
        return digest.hexdigest()

    def _rows(self) -> RowStore:
        """The rows, read in this process where they were not yet."""
        config = self.config
        if self._store is None:
            store = RowStore(
                Path(config.path), prompt=config.prompt, answer=config.answer, chat_template=config.chat_template
            )
            if self._survey is not None and self._survey.digest != store.digest:
                raise DataError(
                    f"{config.path!r} is not the data that were checked: it changed, or differs on this host"
                )
            self._store = store
        return self._store

    def _render(self) -> Renderer:
        if self._renderer is None:
            config = self.config
            self._renderer = Renderer(Path(config.model), system=config.system, chat_template=config.chat_template)
        return self._renderer

    def _surveyed(self) -> Survey:
        """Raises DataError with all that is wrong with the file as a whole and with the model folder."""
        if self._survey is None:
            faults: list[str] = []
            for check in (self._rows, self._limit, self._render):
                try:
                    check()
                except DataError as error:
                    faults += error.faults
            if faults:
                raise DataError(faults)
            skip = self.config.too_long == "skip"
            self._survey = survey(self._rows(), self._render(), limit=self._limit(), skip_too_long=skip)
        return self._survey

    def _checked(self) -> Survey:
        found = self._surveyed()
        if found.faults:
            raise DataError(found.faults)
        return found

    def _limit(self) -> int:
        """Longest prompt in tokens; the model needs room for at least one token more."""
        model, wanted = self.max_model_tokens(), self.config.max_prompt_tokens
        if model is None:
            if wanted is None:
                raise DataError(
                    f"config.json of {self.config.model!r} gives no longest sequence: set max_prompt_tokens"
                )
            return wanted
        if wanted is not None and wanted >= model:
            raise DataError(
                f"max_prompt_tokens must be less than the model's longest sequence of {model} tokens, got {wanted}"
            )
        return wanted or model - 1


def _group(record: Record, renderer: Renderer, *, epoch: int, position: int) -> pa.RecordBatch:
    text = renderer.text(record.prompt)
    columns = {
        "group_id": f"r{record.number:06d}.e{epoch}",
        "order": position,
        "prompt": text,
        "prompt_ids": renderer.ids([text])[0],
        "target": record.target,
        "meta": record.meta,
    }
    return pa.RecordBatch.from_pylist([columns], schema=Prompted.arrow())
