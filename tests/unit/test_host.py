"""A stage's process, without Ray."""

from __future__ import annotations

import pickle
import threading

import pyarrow as pa
import pytest
from small_world import Score

from rollstream.graphs.edge_actor import PeerDied
from rollstream.graphs.host import StageHost
from rollstream.stages.base import MapStage, UpdateStage, World
from rollstream.stages.errors import StageError
from rollstream.stages.schema import Advantaged, Rollouts, Scored, Trained


def test_a_process_that_is_new_is_as_good_as_dead_to_an_edge_that_pulls_it():
    """An edge may be mended while the stage before it is, too: the run must not end with that stage's first words."""
    with pytest.raises(PeerDied, match="this process of score is new: it is pulled once it is loaded"):
        next(StageHost(Score(), World()).produce("score/0/1", (0, frozenset())))


class Odd(BaseException):
    """Can't be made again from its arguments, as unpickling would, and can't be printed."""

    def __init__(self, first, second):
        super().__init__(first)

    def __str__(self):
        raise ValueError


ERRORS = [
    KeyError("a"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(1),
    MemoryError(),
    Odd(1, 2),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_stage_raises_travels_as_text_with_its_traceback(error):
    class Raises(MapStage[Rollouts, Scored]):
        def setup(self, world):
            raise error

        def process(self, group):
            return {}

    with pytest.raises(StageError) as caught:
        StageHost(Raises(name="score"), World()).setup("127.0.0.1", 0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.stage, again.subject) == ("score", "set-up")
    assert type(error).__name__ in again.cause
    assert "in setup\n    raise error" in again.cause


def test_the_head_of_a_group_says_what_training_on_it_costs():
    columns = {"group_id": ["g0"] * 2, "order": [0] * 2, "prompt_ids": [[1, 2]] * 2, "response_ids": [[3], [4, 5, 6]]}
    host = StageHost(Score(), World())
    group = pa.RecordBatch.from_pydict(columns)
    assert host._head(group, version=0, begun=0.0).num_tokens == 8
    assert host._head(group.slice(1), version=0, begun=0.0).num_tokens == 5
    assert host._head(group.drop_columns(["response_ids"]), version=0, begun=0.0).num_tokens == 4


class Slow(UpdateStage[Advantaged, Trained]):
    """Its checkpoint is written while it trains."""

    groups_per_step = data_parallel_size = 1
    share_of = weights = load = export = lambda self, *_: None

    def __init__(self):
        super().__init__()
        self.training, self.written = threading.Event(), threading.Event()
        self.rested_in: list[str] = []

    def update(self, groups):
        self.training.set()
        assert self.written.wait(10)
        return {"actor/loss": (1.0, 1.0)}

    def save(self, folder):
        pass

    def finish_save(self):
        assert self.training.wait(10)

    def rest(self):
        self.rested_in.append(threading.current_thread().name)


def test_a_save_that_ends_while_a_step_runs_touches_nothing_of_the_step(tmp_path):
    stage = Slow()
    host = StageHost(stage, World())
    host.save(tmp_path)

    def write():
        host.finish_save()
        stage.written.set()

    thread = threading.Thread(target=write, name="saving")
    thread.start()
    host.take(1, [])
    assert host.update(1) == {"actor/loss": (1.0, 1.0)}
    thread.join(10)
    assert stage.rested_in == ["MainThread"]
