"""Rows of plain text for `SFTTrainer` (`formatting_func`, `dataset_text_field`): every token is a target token."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from paddlenlp_ext.trainer.load_data import rows_in_memory
from paddlenlp_ext.trl.arguments import SFTConfig

AsText = Callable[[Mapping[str, Any]], str]
"""Function that maps a row to its text."""
_CHAT_FIELDS = {"messages", "prompt", "conversations", "src", "output"}


def text_reader(formatting_func: AsText | None, field: str, train_dataset: Any, eval_dataset: Any) -> AsText | None:
    """Return `formatting_func`, or a function that reads `field`; None if the rows are not plain text in memory.

    Raises:
        ValueError: a dataset is a path, but `formatting_func` is set or `field` is not TRL's default.
    """
    if formatting_func is not None or field != SFTConfig.dataset_text_field:
        used = "formatting_func" if formatting_func is not None else f"dataset_text_field={field!r}"
        for name, dataset in {"train_dataset": train_dataset, "eval_dataset": eval_dataset}.items():
            if dataset is not None and rows_in_memory(dataset) is None:
                raise ValueError(
                    f"{used} reads rows in memory, but {name} is a path; pass the rows of the file as a list of dicts"
                )
    if formatting_func is not None:
        return formatting_func
    rows = rows_in_memory(train_dataset)
    if rows is None or not len(rows) or set(rows[0]) & _CHAT_FIELDS or field not in rows[0]:
        return None
    return lambda row: row[field]


def text_rows(dataset: Any, as_text: AsText) -> Any:
    """Replace each row in memory with a row that contains only its text; a dict of datasets keeps its names."""
    if dataset is None or isinstance(dataset, str | os.PathLike):
        return dataset
    if isinstance(dataset, Mapping):
        return {name: text_rows(rows, as_text) for name, rows in dataset.items()}
    return [{"text": as_text(dataset[index])} for index in range(len(dataset))]
