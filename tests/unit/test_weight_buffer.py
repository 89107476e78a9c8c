"""The buffer that weights are shared in: what is where, and which version."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from rollstream.stages.megatron import weight_buffer
from rollstream.stages.megatron.weight_buffer import WeightBuffer
from rollstream.stages.shared_weights import BUFFER, NONE, SharedTensor, SharedWeights, read_stamp

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(weight_buffer, "make_folder", lambda parent=None: tmp_path)
    return tmp_path


def tensors_in(weights: SharedWeights) -> dict[str, torch.Tensor]:
    data = torch.frombuffer(bytearray(Path(weights.folder, BUFFER).read_bytes()), dtype=torch.uint8)
    parts = {t: data[t.start : t.start + t.num_bytes].clone() for t in weights.tensors}
    return {t.name: part.view(getattr(torch, t.dtype)).view(t.shape) for t, part in parts.items()}


def put(buffer: WeightBuffer, version: int) -> SharedWeights:
    found = buffer.put(version)
    assert found is not None
    return found


def test_tensors_are_as_they_were_and_aligned() -> None:
    given = {"a": torch.arange(5.0), "b": torch.randn(3, 2, dtype=torch.bfloat16), "c": torch.ones(2, 2)[:, 0]}
    found = put(WeightBuffer(lambda: iter(given.items()), CPU), 4)
    assert all(torch.equal(t, given[name]) for name, t in tensors_in(found).items())
    assert found.tensors[1] == SharedTensor("b", "bfloat16", (3, 2), 256, 12)
    assert (found.version, found.handle, found.num_bytes) == (4, None, 520)


def test_weights_are_gone_once_the_next_begin_to_come() -> None:
    weight, seen = torch.zeros(3), []
    old: list[SharedWeights] = []

    def tensors():
        seen.extend((weights.are_there(), read_stamp(Path(weights.folder))) for weights in old)
        yield "w", weight

    buffer = WeightBuffer(tensors, CPU)
    old.append(put(buffer, 1))
    assert old[0].are_there()
    weight += 1
    new = put(buffer, 2)
    assert seen == [(False, NONE)]
    assert (old[0].are_there(), new.are_there()) == (False, True)
    assert torch.equal(tensors_in(new)["w"], weight)


def test_the_same_version_again_disturbs_no_reader() -> None:
    rounds: list[int] = []
    buffer = WeightBuffer(lambda: iter([("w", torch.zeros(3))] if rounds.append(1) is None else []), CPU)
    first = put(buffer, 1)
    assert put(buffer, 1) is first
    assert (first.are_there(), len(rounds)) == (True, 2)  # laid out, and filled, once


def test_weights_are_gone_with_their_process() -> None:
    buffer = WeightBuffer(lambda: iter([("w", torch.zeros(3))]), CPU)
    found = put(buffer, 1)
    buffer.close()
    assert not found.are_there()


def test_other_ranks_take_part_and_hold_nothing() -> None:
    rounds: list[int] = []
    buffer = WeightBuffer(lambda: iter(rounds.append(1) or []), CPU, is_first=False)
    assert (buffer.put(1), buffer.put(2)) == (None, None)
    assert len(rounds) == 3  # one to lay them out


def test_where_shared_memory_is_full_temporary_files_have_room(tmp_path, monkeypatch) -> None:
    small, other = tmp_path / "small", tmp_path / "other"
    for folder in (small, other):
        folder.mkdir()
    monkeypatch.setattr(weight_buffer, "make_folder", lambda parent=None: other if parent else small)
    allocate = os.posix_fallocate

    def full(file: int, start: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(small)):
            raise OSError(errno.ENOSPC, "full")
        allocate(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = put(WeightBuffer(lambda: iter([("w", torch.ones(3))]), CPU), 1)
    assert (found.folder, small.exists()) == (str(other), False)
    assert torch.equal(tensors_in(found)["w"], torch.ones(3))
