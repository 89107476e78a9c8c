"""Reads prompt files a row at a time, each row as plain Python values.

JSON Lines are parsed line by line: a row has its own keys and no others, integers of any size are exact, and a column
may hold another type in each row. The files of a folder are read one after the other, so that their types may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rollstream.stages.errors import DataError

#: Rows that are held in memory at once while a columnar file is read.
BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the data: its values, or what is wrong with it."""

    #: Counted from 1 through all files of the path; in JSON Lines it is the line.
    number: int
    #: File and row in it, where the path is a folder; "" for one file.
    place: str = ""
    values: dict[str, Any] | None = None
    fault: str = ""
    #: Columns of the file; null where each row has its own keys.
    columns: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return f"row {self.number}" + (f" ({self.place})" if self.place else "")


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a .jsonl or .parquet file, a folder of parquet files, or a folder written by datasets' save_to_disk.

    Raises DataError if the path is not there, not one of these, or can't be read.
    """
    if not path.exists():
        raise DataError(f"prompt file {str(path)!r} does not exist (seen from {str(Path.cwd())!r})")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet([path])
    raise DataError(
        f"prompt file {str(path)!r} must end in .jsonl or .parquet, or be a folder of parquet files or one written by "
        f"datasets' save_to_disk; it ends in {path.suffix!r}"
    )


def _read_folder(path: Path) -> Iterator[Row]:
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise DataError(
            f"{str(path)!r} holds the splits {', '.join(splits)}: name one, such as {str(path / splits[0])!r}"
        )
    if (path / "state.json").exists() and (path / "dataset_info.json").exists():
        return _read_saved(path)
    parts = sorted(path.glob("*.parquet"))
    if not parts:
        raise DataError(f"folder {str(path)!r} holds no .parquet file and was not written by datasets' save_to_disk")
    return _read_parquet(parts)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                values = json.loads(text, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                yield Row(number=number, fault=f"is not valid JSON: {error}")
                continue
            if isinstance(values, dict):
                yield Row(number=number, values=values)
            else:
                yield Row(number=number, fault=f"must be a JSON object, got {type(values).__name__}")


def _read_parquet(parts: list[Path]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    for part in parts:
        in_part = 0
        try:
            with pq.ParquetFile(part) as file:
                columns = tuple(file.schema_arrow.names)
                for batch in file.iter_batches(batch_size=BATCH_ROWS):
                    for values in batch.to_pylist(maps_as_pydicts="strict"):
                        number, in_part = number + 1, in_part + 1
                        place = f"{part.name} row {in_part}" if len(parts) > 1 else ""
                        yield Row(number=number, place=place, values=values, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{str(part)!r} can't be read as parquet (after its row {in_part}): {error}") from error


def _read_saved(path: Path) -> Iterator[Row]:
    import datasets

    try:
        saved: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"folder {str(path)!r} can't be read as a saved dataset: {error}") from error
    number = 0
    for table in saved.with_format("arrow").iter(batch_size=BATCH_ROWS):
        for values in table.to_pylist(maps_as_pydicts="strict"):
            number += 1
            yield Row(number=number, values=values, columns=tuple(table.column_names))
