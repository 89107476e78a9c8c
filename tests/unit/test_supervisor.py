"""Who is replaced, when and how often: without Ray, without threads, and time is a list of the pauses made."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rollstream.graphs import supervisor as supervising
from rollstream.graphs.flow import RowsLost
from rollstream.graphs.stats import EdgeStats
from rollstream.graphs.supervisor import Supervisor
from rollstream.stages.errors import ProcessDied, StageError


class Actor:
    """`die` ends the calls that wait for its end."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.stay = SimpleNamespace(remote=self._stay)

    def _stay(self) -> Any:
        self.calls.append(SimpleNamespace(ended=False))
        return Call(self.calls[-1])

    def die(self) -> None:
        for call in self.calls:
            call.ended = True


class Call:
    def __init__(self, life: Any):
        self.life = life


class Inline:
    """An executor that has done all when it is asked."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def submit(self, do: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(do(*args))
        except Exception as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        return future


class Flow:
    """Takes down what it is asked; `raises` is raised by the next mending."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.raises: list[Exception] = []

    def _do(self, *what: Any) -> None:
        self.asked.append(what)
        if self.raises:
            raise self.raises.pop(0)

    def renew_replica(self, stage: str, number: int, died: str) -> None:
        self._do("renew", stage, number)

    def mend_replica(self, stage: str, number: int) -> None:
        self._do("pull", stage, number)

    def mend_edge(self, producer: str, version: int) -> None:
        self._do("edge", producer, version)

    def holder(self, name: str) -> tuple[str, int] | None:
        return ("score", 1) if name == "score/1/7" else None


class Run:
    """A supervisor over fakes: `score` has two replicas of two ranks each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_restarts: int = 2):
        self.flow, self.told, self.pauses, self.restarts, self.ended = Flow(), [], [], [], []
        self.score = [[Actor(), Actor()], [Actor(), Actor()]]
        self.update, self.edge, self.store = Actor(), Actor(), Actor()
        graph = SimpleNamespace(update=SimpleNamespace(name="update"), weights="weights")
        hosts = {"score": self.score, "update": [[self.update]]}
        crew: Any = SimpleNamespace(graph=graph, hosts=hosts, edges={"score": self.edge}, store=self.store)
        monkeypatch.setattr(supervising, "ray", SimpleNamespace(wait=self._wait, get=self._get))
        monkeypatch.setattr(supervising, "ThreadPoolExecutor", Inline)
        monkeypatch.setattr(supervising, "time", SimpleNamespace(sleep=self.pauses.append))
        monkeypatch.setattr(supervising.actors, "restart", self.ended.append)
        self.supervisor = Supervisor(
            crew,
            self.flow,  # type: ignore[arg-type]
            max_restarts=max_restarts,
            tell=self.told.append,
            restarted=self.restarts.append,
        )

    def _wait(self, calls: list[Call], num_returns: int, timeout: float) -> Any:
        return [call for call in calls if call.life.ended], []

    def _get(self, call: Call, timeout: float) -> None:
        raise RayActorError(error_msg="signal 9")

    def look(self) -> None:
        self.supervisor.look(5)

    def dies(self, actor: Actor) -> None:
        """It is mended, and the supervisor has noticed that."""
        actor.die()
        self.look()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_where_nobody_dies_nothing_is_done(run):
    run.look()
    assert (run.flow.asked, run.told, run.restarts) == ([], [], [])


def test_a_replica_is_started_again_as_a_whole_and_pulled(run):
    run.dies(run.score[1][1])
    assert run.flow.asked == [("renew", "score", 1), ("pull", "score", 1)]
    assert run.told == ["stage score died and is started again: signal 9"]
    assert run.restarts == ["score"]


def test_ranks_that_end_with_their_replica_count_as_one_death(run):
    run.score[0][0].die()
    run.dies(run.score[0][1])
    run.look()
    assert run.flow.asked == [("renew", "score", 0), ("pull", "score", 0)]


def test_the_new_processes_are_watched(run):
    run.dies(run.score[0][1])
    run.dies(run.score[0][0])
    assert run.flow.asked == [("renew", "score", 0), ("pull", "score", 0)] * 2


def test_an_edge_is_mended_for_the_version_at_hand(run):
    run.dies(run.edge)
    assert run.flow.asked == [("edge", "score", 5)]
    assert run.told[0].startswith("the edge behind score died and is started again")


def test_after_the_weight_store_died_the_weights_are_to_be_published(run):
    assert not run.supervisor.must_publish
    run.dies(run.store)
    assert run.supervisor.must_publish


def test_where_the_update_stage_dies_only_the_checkpoint_helps(run):
    with pytest.raises(ProcessDied, match="stage 'update' failed:\nits process died: "):
        run.dies(run.update)


def test_where_rows_are_lost_only_the_checkpoint_helps(run):
    run.flow.raises = [RowsLost("score", "", "its journal lacks 2 groups")]
    with pytest.raises(RowsLost):
        run.dies(run.edge)


def test_each_start_comes_later_and_there_is_an_end_to_it(run):
    run.dies(run.edge), run.dies(run.edge)
    assert run.pauses == [0.25, 0.5]
    with pytest.raises(StageError, match=r"the edge behind score died 3 times .* \(max_restarts=2\). The last time: "):
        run.dies(run.edge)


def test_a_finished_step_forgives_and_replicas_are_counted_apart(run):
    run.dies(run.score[0][0]), run.dies(run.score[1][0]), run.dies(run.score[0][0])
    run.supervisor.step_done()
    run.dies(run.score[0][0])
    assert run.pauses == [0.25, 0.25, 0.5, 0.25]


def test_without_restarts_the_first_death_ends_the_run(monkeypatch):
    run = Run(monkeypatch, max_restarts=0)
    with pytest.raises(StageError, match="stage score died 1 times"):
        run.dies(run.score[0][0])


def test_a_process_that_dies_while_it_is_loaded_is_started_once_more(run):
    run.flow.raises = [ProcessDied("score", "", "died again")]
    run.dies(run.score[0][0])
    assert run.pauses == [0.25, 0.5]
    run.look()
    assert run.flow.asked == [("renew", "score", 0), ("renew", "score", 0), ("pull", "score", 0)]


def test_a_stage_whose_new_process_does_not_load_ends_the_run(run):
    run.flow.raises = [StageError("score", "set-up", "FileNotFoundError")]
    with pytest.raises(StageError, match="stage 'score' failed on set-up"):
        run.dies(run.score[0][0])


def stats(*overdue: str) -> EdgeStats:
    counts: dict[str, Any] = dict.fromkeys(("groups", "leased", "nbytes", "max_groups", "max_bytes"), 0)
    rest: dict[str, Any] = {"oldest_age_s": 0.0, "oldest_group": "", "total_groups": 0, "redelivered": 0}
    return EdgeStats(name="e", closed=False, overdue=overdue, **counts, **rest)


def test_a_process_that_holds_a_group_for_too_long_is_ended_once(run):
    run.supervisor.note(stats("score/1/7")), run.supervisor.note(stats("score/1/7"))
    assert run.ended == [run.score[1][0]]
    assert run.told == ["stage score has held a group for longer than its lease: its process is ended"]


def test_a_holder_that_counts_no_more_is_not_ended(run):
    run.supervisor.note(stats("score/1/6"))
    assert run.ended == []
