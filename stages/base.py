"""What a stage is. A stage computes; it knows no graph, no node and no GPU count.

Kinds, by what the hook takes and gives:

    Source        rows(skip) -> groups of Prompted              prompts
    MapStage      process(group) -> the columns it adds         reward, reference log-probabilities, advantage
    RolloutStage  submit(group); finished() -> new groups       rollout; takes new weights
    UpdateStage   update(groups) -> metrics; owns the weights   actor

Calling a stage on a stream wires it; pyright checks the schemas, and so does the call:

    class Shout(MapStage[Rollouts, Scored]):
        def process(self, group):
            return {"reward": ..., "reward_parts": ...}

    scored = Shout()(rollouts)          # Stream[Scored]

A stage is constructed on the driver, where `faults()` checks all that can be checked without a model, and pickled to
the process that runs it, where `setup(world)` loads what is heavy. Nothing heavy may be imported before `setup`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np
import pyarrow as pa

from rollstream.stages.errors import ConfigError, StalledError, WiringError
from rollstream.stages.memory import Memory
from rollstream.stages.schema import Schema, join_columns, validate
from rollstream.stages.shared_weights import SharedWeights

S_co = TypeVar("S_co", bound=Schema, covariant=True)
In = TypeVar("In", bound=Schema)
Out = TypeVar("Out", bound=Schema)

#: A metric on its way: (sum, count), whose mean is taken once, at the end. In place of a count stands `LARGEST` or
#: `SMALLEST` where it is not a mean that is wanted.
Metric = tuple[float, float]

LARGEST, SMALLEST = math.inf, -math.inf


class Metrics:
    """Sums and counts by name, so that means are right however a batch was cut; and largest and smallest values.

    >>> m = Metrics()
    >>> m.add("loss", 6.0, 3); m.add("loss", 2.0)
    >>> m.add("norm_max", 0.5, LARGEST); m.add("norm_max", 0.25, LARGEST)
    >>> m.means()
    {'loss': 2.0, 'norm_max': 0.5}
    """

    def __init__(self, sums: Mapping[str, Metric] | None = None):
        self.sums: dict[str, Metric] = dict(sums or {})

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """A sum over `count` values, or one value with `LARGEST` or `SMALLEST`; a name is of one kind always."""
        total, count = float(total), float(count)
        if name not in self.sums:
            self.sums[name] = (total, count)
            return
        old, old_count = self.sums[name]
        if not math.isinf(count) and not math.isinf(old_count):
            self.sums[name] = (old + total, old_count + count)
            return
        assert count == old_count, f"{name} is of two kinds: counts {old_count} and {count}"
        beyond = total > old if count == LARGEST else total < old
        if beyond or math.isnan(total):
            self.sums[name] = (total, count)

    def merge(self, other: Mapping[str, Metric]) -> None:
        for name, (total, count) in other.items():
            self.add(name, total, count)

    def take(self) -> dict[str, Metric]:
        """The sums so far; starts again from nothing."""
        sums, self.sums = self.sums, {}
        return sums

    def means(self) -> dict[str, float]:
        """Mean of each metric that has a count; the value of each that is a largest or smallest."""
        return {n: total if math.isinf(count) else total / count for n, (total, count) in self.sums.items() if count}


@dataclass(frozen=True, kw_only=True)
class World:
    """The process that a stage runs in: rank `rank` of `size`; rank 0 listens at address:port."""

    rank: int = 0
    size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    #: Compute threads of this process; 0 leaves the library's default.
    threads: int = 0


@dataclass(frozen=True)
class Filtered:
    """What a map stage gives in place of columns for a group that goes no further; another takes its place."""

    reason: str


class Stream(Generic[S_co]):
    """What a wired stage puts out. `inputs` are the streams it takes in, by the name of the argument."""

    def __init__(self, stage: Stage[Any, Any], schema: type[S_co], inputs: Mapping[str, Stream[Schema]]):
        self.stage = stage
        self.schema = schema
        self.inputs = inputs


class Stage(ABC, Generic[In, Out]):
    """Common to all stages: a frozen `Config`, a name, driver-side checks, and `setup`."""

    consumes: ClassVar[type[Schema]] = Schema
    produces: ClassVar[type[Schema]] = Schema
    #: Runs a model: takes a share of its bundle's GPU, and compute threads.
    uses_device: ClassVar[bool] = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No settings."""

    def __init__(self, config: Any = None, *, name: str | None = None):
        wanted = type(self).Config
        config = wanted() if config is None else config
        if not isinstance(config, wanted):
            raise ConfigError(
                f"{type(self).__name__} takes a {wanted.__qualname__}, got {type(config).__name__}: "
                f"write {type(self).__name__}({wanted.__qualname__}(...))"
            )
        self.config = config
        self.name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        self.metrics = Metrics()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in getattr(cls, "__orig_bases__", ()):
            schemas = [a for a in get_args(base) if isinstance(a, type) and issubclass(a, Schema)]
            if schemas:
                cls.produces = schemas[-1]
                cls.consumes = schemas[0] if len(schemas) > 1 else Schema

    def settings(self) -> dict[str, Any]:
        """The config as plain values, for records."""
        return {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}

    @property
    def num_ranks(self) -> int:
        """Processes that make up one replica of this stage."""
        return 1

    def faults(self) -> list[str]:
        """Everything wrong that can be seen on the driver, without loading a model: one sentence each."""
        return []

    @property
    def devices_per_rank(self) -> int:
        """Devices that one process needs whole; 1 may be shared."""
        return 1

    def memory(self, device_bytes: int) -> Memory | None:
        """What one process takes of a device of so many bytes, by estimate, on the driver; None where it takes none, or
        it is not known."""
        return None

    def setup(self, world: World) -> None:
        """Loads what is heavy. Called once, in the stage's own process; collective where `num_ranks` > 1."""

    def close(self) -> None:
        """Frees what setup took (child processes, groups)."""

    def _wire(self, **inputs: Stream[Any]) -> Stream[Out]:
        return Stream(self, self.produces, inputs)  # type: ignore[arg-type]


def check_wiring(stage: Stage[Any, Any], stream: object, wanted: type[Schema], argument: str = "") -> None:
    """Raises WiringError, naming both schemas, unless `stream` carries all columns of `wanted`."""
    what = f"{type(stage).__name__}'s {argument or 'input'}"
    if not isinstance(stream, Stream):
        raise WiringError(f"{what} must be a stream (a stage called on a stream), got {type(stream).__name__}")
    if not issubclass(stream.schema, wanted):
        lacking = [c for c in wanted.columns if c not in stream.schema.columns]
        raise WiringError(
            f"{what} must be a stream of {wanted.__name__}; {type(stream.stage).__name__} puts out "
            f"{stream.schema.describe()}, which lacks {', '.join(lacking)}. Wire it to a stage that makes "
            f"{wanted.__name__}."
        )


class Source(Stage[Any, Out], Stream[Out]):
    """Where groups begin. A source is its own stream: `Rollout()(Prompts(config))`."""

    def __init__(self, config: Any = None, *, name: str | None = None):
        Stage.__init__(self, config, name=name)
        Stream.__init__(self, self, self.produces, {})  # type: ignore[arg-type]

    @abstractmethod
    def rows(self, skip: frozenset[int], start: int) -> Iterator[pa.RecordBatch]:
        """Groups in the order of the run from position `start` on, less the positions in `skip`; the same groups for
        the same settings, always. Column `order` holds the position; positions have no gaps."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the data or their order change: a resume with another fingerprint is refused."""


class MapStage(Stage[In, Out]):
    """Adds columns to a group. Replicas are interchangeable; a group never depends on its neighbours."""

    def __call__(self, stream: Stream[In]) -> Stream[Out]:
        check_wiring(self, stream, self.consumes)
        return self._wire(stream=stream)

    @abstractmethod
    def process(self, group: pa.RecordBatch) -> Mapping[str, pa.Array] | Filtered:
        """The columns that this stage adds, one row for each row of `group`, or Filtered(why) for a group that is not
        to be trained on. Called on every rank with the same group; what rank 0 returns goes on."""

    def run(self, group: pa.RecordBatch) -> pa.RecordBatch | Filtered:
        """`process`, checked: exactly the added columns of the schema, lengths and nulls right, plus sample_id."""
        found = self.process(group)
        if isinstance(found, Filtered):
            return found
        added = dict(found)
        wanted = {n: t for n, t in self.produces.columns.items() if n not in self.consumes.columns}
        if set(added) != set(wanted):
            raise WiringError(f"{self.name} must add columns {sorted(wanted)}, it added {sorted(added)}")
        part = pa.RecordBatch.from_arrays(
            [group.column("sample_id"), *added.values()], names=["sample_id", *added.keys()]
        )
        validate(join_columns([part, group]), wanted, self.produces.nullable, self.name)
        return part


class RolloutStage(Stage[In, Out]):
    """Turns prompts into samples with weights that change under way.

    A stage that is not `continuous` is given up to `groups_in_flight` groups, then asked for what came of them until
    all have come, and takes weights only in between. A continuous one is given groups as others end.
    """

    uses_device = True

    @property
    @abstractmethod
    def groups_in_flight(self) -> int:
        """How many groups it may have at once."""

    @property
    def continuous(self) -> bool:
        """Whether it takes groups while others are under way."""
        return False

    @property
    def updates_in_flight(self) -> bool:
        """Whether it takes weights while groups are under way; needs `continuous`."""
        return False

    @abstractmethod
    def submit(self, group: pa.RecordBatch) -> None:
        """Takes a prompt in."""

    @abstractmethod
    def finished(self, timeout_s: float) -> pa.RecordBatch | None:
        """The next group that is complete; None where none is in time. A stage that is not continuous works here, for
        as long as it takes. Raises EngineDied where its engine's process is gone."""

    @abstractmethod
    def load_weights(self, version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Takes the weights of `version` in Hugging Face names; all that is sampled from then on comes of them."""

    @property
    def reads_shared_weights(self) -> bool:
        """Whether it has `load_shared_weights`."""
        return False

    def load_shared_weights(self, weights: SharedWeights) -> bool:
        """As `load_weights`, from memory that the update stage fills. False where other weights took their place
        meanwhile: then newer ones must be loaded before anything is sampled."""
        raise NotImplementedError(f"{self.name} does not read shared weights")

    def rest(self) -> None:
        """Nothing is under way: others may have the device until new weights come. May be called in another thread,
        never while another method is at work."""

    def __call__(self, stream: Stream[In]) -> Stream[Out]:
        check_wiring(self, stream, self.consumes)
        return self._wire(stream=stream)

    def take(self, timeout_s: float) -> pa.RecordBatch | None:
        """`finished`, checked."""
        group = self.finished(timeout_s)
        if group is not None:
            validate(group, self.produces.columns, self.produces.nullable, self.name)
        return group

    def run(self, groups: Iterable[pa.RecordBatch], *, timeout_s: float = 600.0) -> Iterator[pa.RecordBatch]:
        """What comes of these groups and no others, as they end; for use outside a graph. Raises StalledError where
        none ends for `timeout_s`."""
        waiting, num_flying, drained = iter(groups), 0, False
        while True:
            while not drained and num_flying < self.groups_in_flight:
                group = next(waiting, None)
                drained = group is None
                if group is not None:
                    self.submit(group)
                    num_flying += 1
            if not num_flying:
                return
            while num_flying:
                done = self.take(timeout_s)
                if done is None:
                    raise StalledError(f"{self.name}: no group ended in {timeout_s:g} s")
                num_flying -= 1
                yield done
                if self.continuous:
                    break


class UpdateStage(Stage[In, Out]):
    """Owns weights and changes them: one call of `update` is one step."""

    uses_device = True

    @property
    @abstractmethod
    def groups_per_step(self) -> int:
        """Groups that one step consumes."""

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Shares that a step's groups are cut into; ranks of one share get the same groups."""

    @abstractmethod
    def share_of(self, rank: int) -> int:
        """The data-parallel index of a rank."""

    @abstractmethod
    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        """One step on this rank's share of the groups; collective. The metrics of all ranks add up to the step's."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Current weights in Hugging Face names, a tensor at a time; collective, put out on rank 0 only."""

    def share_weights(self, version: int) -> SharedWeights | None:
        """Current weights as `version`, in memory that others on this machine and GPU can read, until the next call;
        collective, put out on rank 0 only. A stage without such memory need not have it: `shares_weights`."""
        raise NotImplementedError(f"{self.name} does not share its weights")

    @property
    def shares_weights(self) -> bool:
        """Whether it has `share_weights`."""
        return False

    def rest(self) -> None:
        """Called when its weights are out: until the next call, other stages may have the device."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Takes weights, optimizer, scheduler and random state as they are, and writes them or begins to: `folder` is
        whole when `finish_save` has returned on all ranks. Collective; the next `update` may come at once."""

    def finish_save(self) -> None:
        """Waits until what `save` began is written, and raises if it could not be. Called once after each `save`, from
        another thread than `update`, which may run meanwhile. Nothing to do where `save` writes all itself."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, exactly; collective."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes a folder that transformers loads; collective."""
