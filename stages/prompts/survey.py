"""Renders and tokenises every row once, on the driver: lengths are those of the ids that will be sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollstream.stages.prompts.render import Renderer
from rollstream.stages.prompts.store import Record, RowStore

#: Rows that are tokenised in one call.
BATCH_ROWS = 512
#: Faults of rows that are shown; the rest is counted.
SHOWN_FAULTS = 10


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over all rows found."""

    #: Digest of the rows.
    digest: str
    #: Indices in the store of the rows that are used, in the order of the data: int64 [kept].
    kept: np.ndarray
    #: Rows left out because they are too long.
    num_skipped: int
    #: Tokens of the longest prompt that is used.
    longest: int
    #: Rows that are wrong, the first few and how many more.
    faults: list[str]


def survey(store: RowStore, renderer: Renderer, *, limit: int, skip_too_long: bool) -> Survey:
    """Checks every row; a prompt may have at most `limit` tokens."""
    faults, kept, num_skipped, longest = list(store.faults), [], 0, 0
    for start in range(0, len(store), BATCH_ROWS):
        rendered: list[tuple[int, Record, str]] = []
        for index in range(start, min(start + BATCH_ROWS, len(store))):
            record = store[index]
            try:
                text = renderer.text(record.prompt)
                text.encode("utf-8")
                rendered.append((index, record, text))
            except ValueError as error:
                faults.append(f"{record.label} {store.prompt!r}: {error}")
        lengths = [len(ids) for ids in renderer.ids([text for _, _, text in rendered])] if rendered else []
        for (index, record, _), length in zip(rendered, lengths, strict=True):
            if not length:
                faults.append(
                    f"{record.label} {store.prompt!r} has text but no token: is the tokenizer in the model's folder "
                    "the model's own?"
                )
            elif length <= limit:
                kept.append(index)
                longest = max(longest, length)
            elif skip_too_long:
                num_skipped += 1
            else:
                faults.append(f"{record.label} {store.prompt!r} has {length} tokens, the limit is {limit}")
    if not kept and not faults:
        faults.append(
            f"no prompt is left: {store.rows_read} rows read, {num_skipped} skipped as longer than {limit} tokens"
        )
    return Survey(
        digest=store.digest,
        kept=np.array(kept, np.int64),
        num_skipped=num_skipped,
        longest=longest,
        faults=_one_screen(faults),
    )


def _one_screen(faults: list[str]) -> list[str]:
    more = len(faults) - SHOWN_FAULTS
    return [*faults[:SHOWN_FAULTS], f"and {more} more rows like these"] if more > 0 else faults
