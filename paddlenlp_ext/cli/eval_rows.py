"""Find the eval rows of a run, for `pnx predict` and `pnx eval`.

If no single data file holds exactly these rows, they are written to eval_rows.jsonl in the folder of the run. Examples
are rows that `dev_ratio` held out, the rows of a built-in dataset, and rows whose columns `column_mapping` renames.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paddlenlp_ext.cli.run_folder import RunFolder
from paddlenlp_ext.config.dev_sets import dev_sets
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.base import FileReader, Reader
from paddlenlp_ext.data.readers.dataset_files import open_dataset
from paddlenlp_ext.data.readers.inflection import InflectionReader
from paddlenlp_ext.data.readers.splits import MissingSplitError
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.trainer.checkpoints.output_dir import EVAL_ROWS_FILE
from paddlenlp_ext.utils.files import atomic_file
from paddlenlp_ext.utils.json_reader import IN_MEMORY
from paddlenlp_ext.utils.logging import get_logger

_KEYS = ("dataset_name_or_path", "eval_dataset_path", "dev_ratio", "column_mapping", "task_name")


def find_eval_rows(run: RunFolder) -> Path | None:
    """Return the file with the eval rows of a run; write the file if no data file holds exactly these rows.

    Returns:
        The file; None if the dataset has no eval split, was in memory or is unknown, or if there are several dev sets.

    Raises:
        ValueError: the dataset does not exist or cannot be read.
    """
    data = DataConfig(**{key: run.settings[key] for key in _KEYS if key in run.settings})
    if data.dev_ratio and run.settings.get("train_dataset_path") is not None:
        data = replace(data, dataset_name_or_path=run.settings["train_dataset_path"])
    paths = list(dev_sets(data).values())
    if len(paths) > 1 or paths[0] in (None, IN_MEMORY):
        return None
    try:
        readers = open_dataset(replace(data, dataset_name_or_path=paths[0]), "dev")
        first = readers[0]
        if len(readers) == 1 and isinstance(first, FileReader) and not isinstance(first, InflectionReader):
            return first.path
        return _write(readers, run.path / EVAL_ROWS_FILE)
    except MissingSplitError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{run.path}: the eval rows of the run cannot be read ({error}); pass --data ROWS.jsonl"
        ) from error


def _write(readers: Sequence[Reader], path: Path) -> Path:
    """Write the rows of the readers to a file, one JSON object per line."""
    rows = [row for reader in readers for row in reader.rows()]
    values = [row.value for row in rows if isinstance(row, SourceRow)]
    if len(values) < len(rows):
        raise DataError([row for row in rows if isinstance(row, InvalidRow)])
    names = ", ".join(reader.name for reader in readers)
    if not values:
        raise ValueError(f"{names}: no rows{readers[0].cause_if_empty}")
    with atomic_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(value, ensure_ascii=False, default=str) + "\n" for value in values)
    get_logger().info("%s: the %s eval rows of %s", path, f"{len(values):,}", names)
    return path
