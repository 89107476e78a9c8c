"""A process that writes a journal is killed, for real, wherever it happens to be."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import closing

import pytest

from rollstream.graphs.journal import Journal

#: Puts one group after another, drops the one four before it, and says so after each.
WRITER = """
import sys
from pathlib import Path
import pyarrow as pa
from rollstream.graphs.journal import Journal

journal = Journal(Path(sys.argv[1]), segment_bytes=1 << 20)
for order in range(int(sys.argv[2]), 10**9):
    batch = pa.RecordBatch.from_pydict({"n": pa.array([order] * 60_000, pa.int64())})
    journal.put(order, {"group_id": f"g{order}"}, batch)
    print("put", order, flush=True)
    journal.drop([order - 4])
    print("drop", order - 4, flush=True)
"""


def after(live: set[int], what: str, order: int) -> set[int]:
    return live | {order} if what == "put" else live - {order}


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_process_has_put_and_dropped_what_it_said(tmp_path, seed):
    live: set[int] = set()
    first = 0
    for num_lines in random.Random(seed).choices(range(1, 150), k=2):  # the second goes on in what the first left
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline() for _ in range(num_lines)]
            writer.kill()
            said += [line for line in writer.stdout if line.endswith("\n")]
        for line in said:
            what, order = line.split()
            live = after(live, what, int(order))
        unsaid = after(live, "drop", int(order) - 4) if what == "put" else after(live, "put", int(order) + 5)
        found: set[int] = set()
        with closing(Journal(tmp_path)) as left:
            for head, batch in left.refill():
                found |= set(batch["n"].to_pylist())
                assert head["group_id"] == f"g{batch['n'][0]}"
        assert found in (live, unsaid)
        live, first = found, max(found) + 1
