"""Datasets on the Hugging Face hub, read with the package `datasets` (the extra `hub`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, Block, Cursor, ParsedBlock, Reader, column_rows
from paddlenlp_ext.data.readers.splits import choose_split
from paddlenlp_ext.utils.optional_packages import import_extra

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id, `owner/name`."""
    return _HUB_ID.fullmatch(name) is not None


class HubReader(Reader):
    """Reader of a split of a hub dataset; a cursor is the index of the next row.

    The line of a location is the row number. Null values are left out of rows.

    Args:
        name: hub id.
        split: "train", "dev" or "test"; `choose_split` selects a split of the dataset.
        task_name: configuration of the dataset; None for a dataset with a single configuration.
        is_stream: whether to read rows during the download.

    Raises:
        ValueError: `datasets` is not installed, the dataset cannot be fetched, or it has no such split.
    """

    def __init__(self, name: str, split: str, task_name: str | None = None, is_stream: bool = False) -> None:
        datasets = import_extra("datasets", "hub", f"dataset_name_or_path: no file or folder {name!r}; a hub dataset")
        try:
            splits = datasets.load_dataset(name, task_name, streaming=is_stream)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"dataset_name_or_path: no file or folder {name!r}, and it could not be fetched from the Hugging Face "
                f"hub ({str(error).strip().splitlines()[0]}); without a network, use the path of a directory"
            ) from error
        found = choose_split(split, list(splits), name)
        self.name = f"{name}:{found}"
        self._rows: Any = splits[found]

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor."""
        (row,) = start or (0,)
        total = getattr(self._rows, "num_rows", None)
        rows = iter(self._rows.skip(row))
        while values := list(itertools.islice(rows, BLOCK_ROWS)):
            parsed = column_rows(self.name, row, values)
            row += len(parsed)
            yield ParsedBlock((row,), row / total if total else 0.0, parsed)

    def fingerprint(self, observe: Callable[[bytes], None]) -> tuple[str, str]:
        """Return the name of the split and the fingerprint that the package `datasets` computes."""
        return self.name, str(self._rows._fingerprint)
