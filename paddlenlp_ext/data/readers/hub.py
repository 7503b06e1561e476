"""Data sets on the Hugging Face hub, read with the package `datasets` (the extra `hub`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, Block, Cursor, ParsedBlock, Reader
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.optional_packages import import_extra

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SPLIT_NAMES = {"train": ("train",), "dev": ("dev", "validation", "test")}
"""Split of a run -> its names on the hub, the preferred name first."""
_SAVED = "dataset_dict.json"
"""File that `DatasetDict.save_to_disk` writes into its folder."""


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id, `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `DatasetDict.save_to_disk` wrote the folder."""
    return (folder / _SAVED).is_file()


class HubReader(Reader):
    """Reader of a split of a hub data set; a cursor is the number of rows before it.

    The line of a location is the row number. A column that is null in a row is left out of the row.

    Args:
        name: hub id, or a folder that `DatasetDict.save_to_disk` wrote.
        split: "train" or "dev"; "dev" selects the first of the splits dev, validation and test that exists.
        task_name: configuration of the data set; None for the only configuration.
        is_stream: read rows during the download.

    Raises:
        ValueError: `datasets` is not installed, the data set cannot be fetched, or it has no such split.
    """

    def __init__(self, name: str, split: str, task_name: str | None = None, is_stream: bool = False) -> None:
        datasets = import_extra("datasets", "hub", f"dataset_name_or_path: {name!r} is not a directory, and a hub id")
        try:
            if is_saved_dataset(Path(name).expanduser()):
                splits = datasets.load_from_disk(str(Path(name).expanduser()))
            else:
                splits = datasets.load_dataset(name, task_name, streaming=is_stream)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"dataset_name_or_path: {name!r} is not a directory, and it could not be fetched from the Hugging Face "
                f"hub ({str(error).strip().splitlines()[0]}); without a network, use the path of a directory"
            ) from error
        found = next((known for known in _SPLIT_NAMES[split] if known in splits), None)
        if found is None:
            raise ValueError(
                f"{name}: no {' or '.join(_SPLIT_NAMES[split])} split; the data set has {', '.join(sorted(splits))}"
            )
        self.name = f"{name}:{found}"
        self._rows: Any = splits[found]

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor."""
        (row,) = start or (0,)
        total = getattr(self._rows, "num_rows", None)
        rows = iter(self._rows.skip(row))
        while values := list(itertools.islice(rows, BLOCK_ROWS)):
            parsed = tuple(self._row(row + index, value) for index, value in enumerate(values))
            row += len(parsed)
            yield ParsedBlock((row,), row / total if total else 0.0, parsed)

    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return the name and the fingerprint that `datasets` computes from the data and its version."""
        return self.name, str(self._rows._fingerprint)

    def _row(self, index: int, value: dict[str, Any]) -> SourceRow:
        fields = {name: part for name, part in value.items() if part is not None}
        return SourceRow(Location(self.name, index + 1, 1), fields)
