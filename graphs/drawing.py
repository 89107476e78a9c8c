"""A graph as text: the longest chain on one line, each side chain below it, between the stages that it joins.

prompts -> rollout -> reward -> advantage -> actor_update
                \\-> ref_logprob ------------/
weights: actor_update -> rollout (at most 0 versions behind)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollstream.graphs.weights import Weights

if TYPE_CHECKING:
    from rollstream.graphs.graph import EdgeSpec


def draw(edges: Sequence[EdgeSpec], source: str, weights: Weights | None) -> str:
    """The drawing, with the weight edge below. What hangs on a side chain is told in a line of its own."""
    consumers = {e.producer: list(e.consumers) for e in edges}
    chain = _longest(source, consumers)
    start = {name: sum(len(n) + 4 for n in chain[:i]) for i, name in enumerate(chain)}
    lines = [" -> ".join(chain)]
    drawn = set(itertools.pairwise(chain))
    for left in chain:
        for first in consumers.get(left, []):
            if (left, first) in drawn:
                continue
            side = [first]
            while side[-1] not in start and consumers.get(side[-1]):
                side.append(consumers[side[-1]][0])
            drawn |= set(itertools.pairwise([left, *side]))
            lines.append(_side_line(start[left] + len(left) - 1, side, start.get(side[-1])))
    lines += [f"{p} -> {c}" for p, taking in consumers.items() for c in taking if (p, c) not in drawn]
    if weights:
        lines.append(
            f"weights: {weights.source.stage.name} -> {weights.to.stage.name} "
            f"(at most {weights.max_staleness} versions behind)"
        )
    return "\n".join(lines)


def _side_line(begin: int, side: Sequence[str], end: int | None) -> str:
    """A side chain from column `begin` up to the stage of the main chain at column `end`, or to its own end."""
    inside = side if end is None else side[:-1]
    line = " " * begin + "\\-" + ("> " + " -> ".join(inside) + " " if inside else "")
    return line.rstrip() if end is None else line + "-" * max(end - len(line) - 1, 1) + "/"


def _longest(name: str, consumers: dict[str, list[str]]) -> list[str]:
    tails = [_longest(c, consumers) for c in consumers.get(name, [])]
    return [name, *max(tails, key=len, default=[])]
