"""Where groups begin: prompts from a file, in an order that a restart repeats.

files.py    path -> rows as plain Python          one reader a format
plain.py    a value -> JSON text, exactly
render.py   prompt -> the text the model sees -> token ids
store.py    rows on disk, any of them at once
survey.py   every row rendered once: faults, lengths, which rows are kept
order.py    the order of an epoch
stage.py    Prompts
"""

from __future__ import annotations

from rollstream.stages.prompts.stage import Prompts

__all__ = ["Prompts"]
