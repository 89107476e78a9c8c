from __future__ import annotations

import pytest

from rollstream.graphs.ledger import Ledger


def test_the_frontier_passes_what_was_trained_ahead_of_it():
    ledger = Ledger()
    ledger.commit([3, 1])
    assert (ledger.frontier, ledger.ahead) == (0, {1, 3})
    ledger.commit([0])
    assert (ledger.frontier, ledger.ahead) == (2, {3})
    ledger.commit([2])
    assert (ledger.frontier, ledger.ahead) == (4, set())


def test_it_goes_on_from_what_was_saved():
    ledger = Ledger(5, {7})
    ledger.commit([5, 6])
    assert (ledger.frontier, ledger.ahead) == (8, set())


@pytest.mark.parametrize("again", [4, 7])
def test_a_group_trained_twice_is_refused(again):
    with pytest.raises(AssertionError, match=f"group at {again} was trained before"):
        Ledger(5, {7}).commit([again])


def test_a_group_twice_in_one_step_is_refused():
    with pytest.raises(AssertionError, match="group at 1"):
        Ledger().commit([1, 1])
