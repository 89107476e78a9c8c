from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file

from rollstream.stages.rollout import weight_files
from rollstream.stages.rollout.weight_files import files_of
from rollstream.stages.shared_folder import make_folder


def test_files_hold_all_tensors_in_order_and_no_more_than_they_may(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "FILE_BYTES", 100)
    tensors = [(f"w{i}", np.full((size,), i, np.float32)) for i, size in enumerate((10, 10, 5, 50, 1))]
    found = []
    for path in files_of(tensors, tmp_path):
        found.append(load_file(path))
        path.unlink()
    assert [list(file) for file in found] == [["w0", "w1", "w2"], ["w3"], ["w4"]]
    for name, array in tensors:
        (got,) = [file[name] for file in found if name in file]
        np.testing.assert_array_equal(got, array)


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=30)
    left, used = tmp_path / f"rollstream-{ended.pid}-x", tmp_path / f"rollstream-{os.getpid()}-x"
    other = tmp_path / "rollstream-notes-x"
    for folder in (left, used, other):
        folder.mkdir()
    made = make_folder(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {used.name, other.name, made.name}
