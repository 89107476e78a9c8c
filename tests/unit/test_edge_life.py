"""An edge's process, run without Ray: begun again after its death, its journal, and groups that it sets aside."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest
from edge_toys import ROWS, head, journalled, producer, pull, run, until

from rollstream.graphs import edge_actor
from rollstream.graphs.edge_actor import EdgeActor
from rollstream.graphs.item import Item
from rollstream.stages.errors import ProcessDied

# Life ----------------------------------------------------------------------------------------------------------------


def test_a_new_process_gives_nothing_and_pulls_nothing_until_it_is_opened(edge):
    made = edge(begun=False)

    async def do() -> list[Any]:
        pulling = asyncio.ensure_future(made.pull(0, producer(head(0)), "a/0", None))
        before = [await made.is_open(), (await made.lease("b", 8, holder="b/0", timeout_s=0)).items]
        await made.begin({}, (0, ()), 0)
        await made.open()
        await pulling
        return [*before, await made.is_open(), len((await made.lease("b", 8, holder="b/0")).items)]

    assert run(made, do) == [False, (), True, 1]


def test_a_process_that_has_not_begun_cannot_be_opened(edge):
    made = edge(begun=False)
    with pytest.raises(ProcessDied, match="the edge a -> b died while it began"):
        run(made, made.open)


def begun_again(made: EdgeActor, retired: tuple[int, tuple[int, ...]] = (0, ()), version: int = 9) -> dict[int, str]:
    return run(made, lambda: made.begin({}, retired, version))


def test_an_edge_that_died_refills_from_its_journal(edge, tmp_path):
    pull(edge(), producer(head(0), head(1), head(2)))
    made = edge(begun=False)
    for _ in range(2):  # the answer may be lost
        assert begun_again(made) == {0: "b0", 1: "b1", 2: "b2"}
    assert journalled(tmp_path) == [0, 1, 2]
    run(made, made.open)
    (item, *_) = run(made, lambda: made.lease("b", 1, holder="b/0")).items
    again, rows = item.parts[-1].ref
    assert (item.order, again.birth, rows.to_pydict()) == (0, "b0", ROWS.to_pydict())


def test_what_is_retired_or_of_newer_weights_is_left_out_for_good(edge, tmp_path):
    made = [head(4, version=3), head(5, version=2), head(6, version=2, newest_version=3)]
    pull(edge(), producer(*(head(n) for n in range(4)), *made))
    assert set(begun_again(edge(begun=False), retired=(1, (2,)), version=2)) == {1, 3, 5}
    assert journalled(tmp_path) == [1, 3, 5]


def test_groups_whose_rows_the_edge_before_does_not_have_are_made_again(edge, tmp_path):
    pull(edge(), producer(head(0), head(1), head(2)))
    made = edge(begun=False)
    begun_again(made)
    assert run(made, lambda: made.keep({0: "b0", 1: "another"})) == {0: "b0"}
    assert journalled(tmp_path) == [0]
    run(made, made.open)
    assert [i.birth for i in pull(made, producer(head(1, birth="another"))).items] == ["b0", "another"]


def test_a_retired_group_is_out_of_the_journal(edge, tmp_path):
    made = edge()
    pull(made, producer(head(0), head(1)))
    run(made, lambda: made.retire([0, 7]))
    assert journalled(tmp_path) == [1]


class SlowJournal:
    """Its put lasts until it is let go on; takes down the calls in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_go_on = threading.Event()

    def put(self, order: int, head: Any, batch: Any) -> None:
        self.calls.append(f"put {order} begins")
        assert self.may_go_on.wait(5)
        self.calls.append(f"put {order} ends")

    def drop(self, orders: Any) -> None:
        self.calls.append(f"drop {list(orders)}")


def test_a_group_that_is_retired_while_it_is_written_is_dropped_after_that(edge):
    """The journal is no place for two threads."""
    made, slow = edge(), SlowJournal()
    made._journal = slow

    async def do() -> dict[int, str]:
        pulling = asyncio.ensure_future(made.pull(0, producer(head(0)), "a/0", None))
        await until(lambda: bool(slow.calls))
        retiring = asyncio.ensure_future(made.retire([0]))
        for _ in range(10):
            await asyncio.sleep(0)
        slow.may_go_on.set()
        await asyncio.gather(pulling, retiring)
        return await made.held()

    assert run(made, do) == {}
    assert slow.calls == ["put 0 begins", "put 0 ends", "drop [0]"]


def test_a_group_that_the_journal_refuses_goes_on_without_it(edge, capfd):
    made = edge()
    made._journal.put = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    assert [i.order for i in pull(made, producer(head(0))).items] == [0]
    assert "not in the journal: a -> b, g0: [Errno 28] No space left" in capfd.readouterr().err


# Groups that are set aside -------------------------------------------------------------------------------------------


def set_aside(made: EdgeActor, again: Callable[[str], Awaitable[Any]]) -> None:
    """A group that two holders leased, after each of which `again` happened."""

    async def do() -> None:
        await made.pull(0, producer(head(0)), "a/0", None)
        for holder in ("b/0", "b/1"):
            assert (await made.lease("b", 8, holder=holder)).items
            await again(holder)

    run(made, do)


def test_a_group_that_takes_two_holders_down_goes_to_disk_with_its_rows_and_why(edge, tmp_path):
    made = edge()
    set_aside(made, lambda holder: made.release("b", holder, "signal 9"))
    told = json.loads((tmp_path / "quarantine/0.json").read_text())
    assert (told["group_id"], told["stage"], told["item"]["birth"]) == ("g0", "b", "b0")
    assert "signal 9" in told["reason"]
    with pa.OSFile(str(tmp_path / "quarantine/0.arrow")) as file:
        assert pa.ipc.open_file(file).read_all().to_pydict() == ROWS.to_pydict()
    assert [left.order for left in run(made, made.stats).left] == [0]


def test_groups_that_are_retired_while_one_is_fetched_go_to_disk_too(edge, tmp_path, monkeypatch):
    made = edge(max_deaths=1)

    def fetch_slowly(item: Item, edges: Any) -> pa.RecordBatch:
        made._queue.retire([0, 1])
        return ROWS

    monkeypatch.setattr(edge_actor, "fetch", fetch_slowly)
    pull(made, producer(head(0), head(1)))
    run(made, lambda: made.release("b", "b/0", "signal 9"))
    assert sorted(path.name for path in (tmp_path / "quarantine").glob("*.json")) == ["0.json", "1.json"]


def test_a_hung_holder_is_told_of_though_nobody_else_asks(edge, monkeypatch):
    made = edge()
    pull(made, producer(head(0)))
    made._queue._clock = lambda: 1e9
    assert run(made, made.stats).overdue == ("b/0",)


def test_a_group_that_hangs_two_holders_goes_to_disk_too(edge, tmp_path):
    made = edge()
    now = [0.0]
    made._queue._clock = lambda: now[0]

    async def later(holder: str) -> None:
        now[0] += 60.0
        await made.stats()

    set_aside(made, later)
    assert "it did not finish in 60 s" in json.loads((tmp_path / "quarantine/0.json").read_text())["reason"]
