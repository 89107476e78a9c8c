"""Which samples go into one forward pass: a micro-batch. Needs numbers only, no torch.

lengths --micro_batches--> as few as can be --at_least--> as many as the rank that needs most
"""

from __future__ import annotations

from collections.abc import Sequence

from rollstream.stages.base import Metric
from rollstream.stages.errors import check_rules
from rollstream.stages.megatron.bin_packing import fewest_bins


class SampleTooLong(ValueError):
    """The sample `index` has `length` tokens, and no micro-batch holds more than `limit`."""

    def __init__(self, index: int, length: int, limit: int):
        self.index, self.length, self.limit = index, length, limit
        super().__init__(f"sample {index} has {length} tokens; a micro-batch holds {limit} at most")

    def __reduce__(self):
        return type(self), (self.index, self.length, self.limit)


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int, max_samples: int | None = None, multiple_of: int = 1
) -> list[list[int]]:
    """The indices of each micro-batch's samples, every index once: few micro-batches, their tokens nearly equal.

    None has more than `max_tokens` tokens, counting the padding of its end to a multiple of `multiple_of`, nor more
    than `max_samples` samples. The largest comes first, in a micro-batch and among them, so that a lack of memory shows
    at once. In whatever order the same lengths come, the micro-batches have the same ones.

    Raises SampleTooLong for the first sample that does not fit alone, ConfigError for limits that nothing fits.

    >>> micro_batches([3, 9, 4, 6, 2], max_tokens=12)
    [[3, 2, 4], [1, 0]]
    """
    check_rules(
        [
            (multiple_of >= 1, f"multiple_of must be at least 1, got {multiple_of}"),
            (max_tokens >= multiple_of, f"max_tokens must be at least multiple_of={multiple_of}, got {max_tokens}"),
            (max_samples is None or max_samples >= 1, f"max_samples must be at least 1, got {max_samples}"),
        ]
    )
    capacity = max_tokens // multiple_of * multiple_of  # a sum is at most this exactly if it is so with its padding
    for index, length in enumerate(lengths):
        if length > capacity:
            raise SampleTooLong(index, length, capacity)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    falling = [lengths[i] for i in order]
    most = len(lengths) if max_samples is None else max_samples
    found = [sorted(items) for items in fewest_bins(falling, capacity, most) if items]
    found.sort(key=lambda items: (-sum(falling[i] for i in items), -len(items), items))
    return [[order[i] for i in items] for items in found]


def at_least(batches: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` micro-batches of the same samples, for a rank that has fewer than the others: it halves the one with the
    most samples, again and again. Where every sample is alone, empty ones follow. More than `count` stay as they are.

    >>> at_least([[4, 1, 0], [2]], 3), at_least([[4]], 3)
    ([[4, 0], [1], [2]], [[4], [], []])
    """
    made = [list(batch) for batch in batches]
    while len(made) < count:
        place = max(range(len(made)), key=lambda i: len(made[i]), default=0)
        if not made or len(made[place]) < 2:
            break
        made[place : place + 1] = made[place][::2], made[place][1::2]
    return made + [[] for _ in range(count - len(made))]


def padding_fraction(batches: Sequence[Sequence[int]], lengths: Sequence[int], *, multiple_of: int = 1) -> Metric:
    """(tokens that are no sample's, all tokens) of micro-batches: the metric of their share.

    A micro-batch is padded at its end to a multiple of `multiple_of` tokens; one without any token to the first.

    >>> padding_fraction([[0, 1], [2], []], [3, 6, 4], multiple_of=4)
    (7, 20)
    """
    sums = [sum(lengths[i] for i in batch) for batch in batches]
    padded = [max(-(-total // multiple_of), 1) * multiple_of for total in sums]
    return sum(padded) - sum(sums), sum(padded)
