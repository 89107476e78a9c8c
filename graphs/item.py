"""What travels through edges: a group's head, and references to its columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.stages.base import Metric


@dataclass(frozen=True, kw_only=True)
class Part:
    """The columns that one stage added to a group, in an object that the edge behind that stage owns."""

    edge: str  # the stage whose output it is
    nbytes: int
    ref: Any = None  # ObjectRef of (Item, RecordBatch); None where only that edge knows it


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One stage's work on a group."""

    stage: str
    begun: float  # seconds since the epoch
    seconds: float  # for a rollout: from the start of its batch


@dataclass(frozen=True, kw_only=True)
class Item:
    """One group on its way. Made by stage hosts; the rows stay in the object store."""

    group_id: str
    order: int  # position in the run's prompt sequence
    version: int  # weights that began it
    newest_version: int = 0  # the newest weights that a token of it was sampled with
    birth: str  # names this very sampling of the group: rows of another one must never be joined with its rows
    num_rows: int
    num_tokens: int = 0  # what training on it costs: those of each row's prompt and response
    parts: tuple[Part, ...] = ()  # their columns together are the group's
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=lambda: {})  # of all stages so far
    trail: tuple[Leg, ...] = ()  # the stages that it went through
    filtered: str = ""  # why it leaves the graph here, untrained

    def to_json(self) -> dict[str, Any]:
        """All but the references, as plain values."""
        plain = dataclasses.asdict(dataclasses.replace(self, parts=()))
        return plain | {"parts": [[part.edge, part.nbytes] for part in self.parts]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Item:
        """
        >>> item = Item(group_id="g0", order=0, version=0, birth="b", num_rows=1, parts=(Part(edge="a", nbytes=8),))
        >>> Item.from_json(item.to_json()) == item
        True
        """
        given = dict(plain)
        given["parts"] = tuple(Part(edge=edge, nbytes=nbytes) for edge, nbytes in plain["parts"])
        given["metrics"] = {name: (total, count) for name, (total, count) in plain["metrics"].items()}
        given["trail"] = tuple(Leg(**leg) for leg in plain["trail"])
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class Left:
    """A group that left the graph without being trained."""

    order: int
    group_id: str
    kind: str  # filtered | quarantined
    stage: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first error of a run, as it travels down the edges."""

    stage: str
    subject: str  # group or sample
    cause: str  # text of the traceback
    plugin: bool = False  # raised by the user's reward function
