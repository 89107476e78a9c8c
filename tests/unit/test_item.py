from __future__ import annotations

import json

from rollstream.graphs.item import Item, Leg, Part

PARTS = (Part(edge="rollout", nbytes=30, ref="a reference"), Part(edge="reward", nbytes=4, ref="another"))
ITEM = Item(
    group_id="g7",
    order=7,
    version=2,
    birth="5f",
    num_rows=8,
    num_tokens=90,
    parts=PARTS,
    metrics={"reward/mean": (6.5, 8.0)},
    trail=(Leg(stage="rollout", begun=1e9, seconds=0.25), Leg(stage="reward", begun=1e9 + 1, seconds=0.5)),
)


def test_all_but_the_references_comes_back_from_json():
    again = Item.from_json(json.loads(json.dumps(ITEM.to_json())))
    assert again.parts == tuple(Part(edge=part.edge, nbytes=part.nbytes) for part in PARTS)
    assert {**again.__dict__, "parts": ()} == {**ITEM.__dict__, "parts": ()}


def test_references_are_not_looked_at():
    """They can't be copied as plain values are."""
    item = Item(**{**ITEM.__dict__, "parts": (Part(edge="a", nbytes=1, ref=open(__file__)),)})  # noqa: SIM115
    assert item.to_json()["parts"] == [["a", 1]]
    item.parts[0].ref.close()
