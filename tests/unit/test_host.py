"""A stage's process, without Ray."""

from __future__ import annotations

import pytest
from small_world import Score

from rollstream.graphs.edge_actor import PeerDied
from rollstream.graphs.host import StageHost
from rollstream.stages.base import World


def test_a_process_that_is_new_is_as_good_as_dead_to_an_edge_that_pulls_it():
    """An edge may be mended while the stage before it is, too: the run must not end with that stage's first words."""
    with pytest.raises(PeerDied, match="this process of score is new: it is pulled once it is loaded"):
        next(StageHost(Score(), World()).produce("score/0/1", (0, frozenset())))
