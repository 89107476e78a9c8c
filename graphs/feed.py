"""What the update stage's ranks are given, and when.

    a step is trained         the next step's groups, as soon as they are all there: the ranks read them meanwhile
    it begins                 its groups, to ranks that have not read them yet

Each rank gets its share, by references; ranks of one share get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollstream.graphs.joiner import Joined, Joiner
from rollstream.stages.balance import balance
from rollstream.stages.base import UpdateStage
from rollstream.stages.errors import RollstreamError


class Feed:
    """Of one attempt: `joiner` brings the groups, `ranks` are the update stage's processes."""

    def __init__(self, stage: UpdateStage[Any, Any], joiner: Joiner, ranks: Sequence[Any]):
        self._stage, self._joiner, self._ranks = stage, joiner, ranks
        self._ahead: list[Joined] = []  # of the next step, sent to all ranks
        self._error: RollstreamError | None = None

    def wait(self, timeout_s: float, look: Callable[[], bool]) -> list[Joined]:
        """The groups of the next step; fewer only where the prompts have ended, none where `look`, called between two
        waits of `timeout_s`, says that the run is to stop."""
        if self._error is not None:
            raise self._error
        wanted = self._stage.groups_per_step
        while not self._ahead and self._joiner.poll(timeout_s) < wanted and not self._joiner.ended:
            if not look():
                return []
        groups = self._ahead or self._joiner.take(wanted)
        self._joiner.ask()  # the next step's come while this one trains
        return groups

    def begin(self, step: int, groups: Sequence[Joined]) -> list[Any]:
        """Has all ranks train these, which `wait` gave: the calls."""
        is_ahead, self._ahead = bool(self._ahead), []
        if not is_ahead:
            self._send(step, groups)
        return [rank.update.remote(step) for rank in self._ranks]

    def look_ahead(self, step: int) -> None:
        """While the step before trains: sends the ranks the groups of `step`, once they are all there. An error of the
        run waits until that step is done."""
        if self._ahead or self._error is not None:
            return
        try:
            num_ready = self._joiner.poll(0)
        except RollstreamError as error:
            self._error = error
            return
        if num_ready >= self._stage.groups_per_step:
            self._ahead = self._joiner.take(self._stage.groups_per_step)
            self._send(step, self._ahead)

    def _send(self, step: int, groups: Sequence[Joined]) -> None:
        shares = balance([g.num_tokens for g in groups], self._stage.data_parallel_size)
        for number, rank in enumerate(self._ranks):
            rank.take.remote(step, [groups[g].items for g in shares[self._stage.share_of(number)]])
