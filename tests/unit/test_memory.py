from __future__ import annotations

import pytest

from rollstream.graphs.memory import DEFAULT_BYTES, edge_bytes
from rollstream.stages.errors import PlacementError

NODES = [{"CPU": 4.0}, {"CPU": 4.0, "object_store_memory": 8e6}, {"object_store_memory": 1e9}]


def test_edges_take_half_of_the_smallest_store():
    assert edge_bytes(None, 4, NODES) == 1_000_000


def test_edges_take_no_more_than_the_default_of_a_large_store():
    assert edge_bytes(None, 4, [{"object_store_memory": 1e12}]) == DEFAULT_BYTES


def test_where_no_node_tells_of_a_store_the_default_holds():
    assert edge_bytes(None, 4, [{"CPU": 1.0}]) == DEFAULT_BYTES
    assert edge_bytes(10**15, 4, []) == 10**15


def test_a_bound_that_fits_is_taken_as_it_is():
    assert edge_bytes(1_800_000, 4, NODES) == 1_800_000


def test_a_bound_that_the_store_does_not_have_is_refused_with_the_largest_that_fits():
    with pytest.raises(
        PlacementError, match="7,200,004 bytes, but a node's object store has 8,000,000: set at most 1,8"
    ):
        edge_bytes(1_800_001, 4, NODES)
