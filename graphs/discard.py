"""The end of a graph that trains nothing: takes a step's groups and lets them go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollstream.stages.base import Metric, Stage, UpdateStage
from rollstream.stages.schema import Schema, Trained


class Discard(UpdateStage[Schema, Trained]):
    """Stands for the update stage behind the last stage of a run that is cut short. It has no weights. Its checkpoints
    say which groups are done, so that such a run is resumed as any other."""

    uses_device = False

    @dataclass(frozen=True, kw_only=True)
    class Config(Stage.Config):
        """As the update stage that it stands for."""

        #: Groups that one step takes.
        groups_per_step: int

    config: Config

    @property
    def groups_per_step(self) -> int:
        return self.config.groups_per_step

    @property
    def data_parallel_size(self) -> int:
        return 1

    def share_of(self, rank: int) -> int:
        return 0

    def update(self, groups: Sequence[pa.RecordBatch]) -> dict[str, Metric]:
        return {}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return iter(())

    def save(self, folder: Path) -> None:
        """A checkpoint has at least one file of its update stage."""
        (folder / "nothing_trained").touch()

    def load(self, folder: Path) -> None:
        """Nothing was kept."""

    def export(self, folder: Path) -> None:
        """There is no model."""
