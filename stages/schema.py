"""The columns that travel between stages.

    Prompted -> Rollouts -> Scored -> Advantaged          each adds columns; a class is the type of a stream
                        \\-> WithRef                       the reference's log-probabilities, joined by sample_id

A **group** is all samples drawn from one prompt: one compact Arrow `RecordBatch`, one row a sample (in `Prompted`, one
row in all). Token columns are response-aligned: entry t belongs to response token t. Text that must survive exactly,
whatever its type was in the user's file (targets, meta), travels as JSON text.
"""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from rollstream.stages.errors import WiringError

TOKENS = pa.list_(pa.int32())
PER_TOKEN = pa.list_(pa.float32())


class Schema:
    """Columns of a stream. A subclass has its parents' columns and adds its own in `adds`."""

    adds: ClassVar[dict[str, pa.DataType]] = {}
    columns: ClassVar[dict[str, pa.DataType]] = {}
    #: Columns that may hold nulls; null means "not known", never zero.
    nullable: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        merged: dict[str, pa.DataType] = {}
        for base in reversed(cls.__mro__):
            merged.update(base.__dict__.get("adds", {}))
        cls.columns = merged

    @classmethod
    def arrow(cls) -> pa.Schema:
        """All columns as an Arrow schema."""
        return pa.schema([pa.field(n, t, nullable=n in cls.nullable) for n, t in cls.columns.items()])

    @classmethod
    def describe(cls) -> str:
        return f"{cls.__name__} ({', '.join(cls.columns)})"


class Prompted(Schema):
    """One prompt, one row. Made by `Prompts`, used by `Rollout`."""

    adds = {
        "group_id": pa.string(),  # prompt uid and epoch; the same after a restart
        "order": pa.int64(),  # position of the group in the run's prompt sequence, from 0
        "prompt": pa.string(),  # the text the model sees, chat template applied
        "prompt_ids": TOKENS,
        "target": pa.string(),  # JSON of the answer column
        "meta": pa.string(),  # JSON object of the further columns
    }


class Rollouts(Prompted):
    """One row a sample. Made by `Rollout`; the prompt's columns repeat in each row."""

    adds = {
        "sample_id": pa.string(),  # group_id and draw; the same after a restart
        "response": pa.string(),  # decoded without special tokens
        "response_ids": TOKENS,  # ends with the stop token where one was sampled
        "loss_mask": pa.list_(pa.bool_()),  # true: sampled by the policy, trained on
        "finish_reason": pa.string(),  # stop | length
        "rollout_logprobs": PER_TOKEN,  # log-softmax of logits / temperature, no top-p or top-k, at the sampled token
        "weight_version": TOKENS,  # the weights that sampled each token
    }


class Scored(Rollouts):
    """Adds the reward. Made by `Reward`; null means that the reward abstained."""

    adds = {"reward": pa.float64(), "reward_parts": pa.map_(pa.string(), pa.float64())}
    nullable = frozenset({"reward"})


class Advantaged(Scored):
    """Adds the advantage of each response token. Made by `Advantage`, used by `ActorUpdate`."""

    adds = {"advantages": PER_TOKEN}
    nullable = frozenset({"reward"})


class WithRef(Rollouts):
    """Adds the frozen reference model's log-probabilities. Made by `RefLogprob`."""

    adds = {"ref_logprobs": PER_TOKEN}


class Trained(Schema):
    """What an update stage puts out: nothing travels on, its weights do."""


#: Columns whose rows must have one entry for each response token.
RESPONSE_ALIGNED = frozenset(
    {"response_ids", "loss_mask", "rollout_logprobs", "weight_version", "advantages", "ref_logprobs"}
)


def validate(batch: pa.RecordBatch, columns: dict[str, pa.DataType], nullable: frozenset[str], maker: str) -> None:
    """Checks a batch where it is made: column types, nulls, and one entry for each response token.

    Raises WiringError naming the column, the row and the stage.
    """
    for name, wanted in columns.items():
        if name not in batch.schema.names:
            raise WiringError(f"{maker} must put out column {name!r} ({wanted}); it has {batch.schema.names}")
        column = batch.column(name)
        if column.type != wanted:
            raise WiringError(f"{maker}: column {name!r} must be {wanted}, got {column.type}")
        if column.null_count and name not in nullable:
            row = column.is_null().to_pylist().index(True)
            raise WiringError(f"{maker}: column {name!r} is null in row {row}; null is not allowed there")
    aligned = [n for n in columns if n in RESPONSE_ALIGNED]
    if not aligned:
        return
    lead = "response_ids" if "response_ids" in batch.schema.names else aligned[0]
    lengths = batch.column(lead).value_lengths()
    for name in aligned:
        if batch.column(name).value_lengths() != lengths:
            pairs = zip(lengths.to_pylist(), batch.column(name).value_lengths().to_pylist(), strict=True)
            row, (want, got) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
            raise WiringError(f"{maker}: row {row} has {want} entries in {lead!r} but {got} in {name!r}")


def num_tokens(batch: pa.RecordBatch) -> int:
    """Tokens of all rows: of the prompts, and of the responses where there are any.

    >>> num_tokens(pa.RecordBatch.from_pydict({"prompt_ids": [[1, 2], [1, 2]], "response_ids": [[3], []]}))
    5
    """
    there = [name for name in ("prompt_ids", "response_ids") if name in batch.schema.names]
    return sum(len(batch.column(name).flatten()) for name in there)


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A copy that owns only its own rows: pickling a slice would ship the whole parent."""
    if batch.nbytes >= 0.9 * batch.get_total_buffer_size():
        return batch
    return batch.take(pa.array(range(batch.num_rows), pa.int32()))


def join_columns(parts: list[pa.RecordBatch], key: str = "sample_id") -> pa.RecordBatch:
    """One batch with the columns of all parts, rows matched by `key`; columns of equal order are not copied.

    >>> a = pa.RecordBatch.from_pydict({"sample_id": ["x", "y"], "n": [1, 2]})
    >>> b = pa.RecordBatch.from_pydict({"sample_id": ["y", "x"], "m": [4, 3]})
    >>> join_columns([a, b]).to_pydict()
    {'sample_id': ['x', 'y'], 'n': [1, 2], 'm': [3, 4]}
    """
    base = parts[0]
    names, arrays = list(base.schema.names), list(base.columns)
    for part in parts[1:]:
        if part.column(key) != base.column(key):
            place = {v: i for i, v in enumerate(part.column(key).to_pylist())}
            ids: list[str] = base.column(key).to_pylist()
            missing = [v for v in ids if v not in place]
            if missing or len(place) != len(ids):
                raise WiringError(f"cannot join columns {part.schema.names}: {key} {missing[:3]} missing on one side")
            part = part.take(pa.array([place[v] for v in ids], pa.int32()))
        for name, column in zip(part.schema.names, part.columns, strict=True):
            if name not in names:
                names.append(name)
                arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, names=names)
