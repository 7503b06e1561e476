"""Find the files of a dataset and open their readers.

A dataset is a directory, the name of a built-in dataset, or a data set on the Hugging Face hub. A directory holds
`train.json` and `dev.json`, or folders `train/` and `dev/` with such files. The suffix of a file selects its format.
Several datasets are read one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.base import READERS, Reader, known_suffixes, suffix_of
from paddlenlp_ext.data.readers.hub import HubReader, is_hub_id, is_saved_dataset
from paddlenlp_ext.data.readers.inflection import InflectionReader
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.suggest import did_you_mean

SPLITS = ("train", "dev")
ADVERTISE_GEN = "AdvertiseGen"
"""Dataset of PaddleNLP's examples, which users download themselves."""
BUILTIN_NAMES = ("inflection",)


def dataset_names(dataset_name_or_path: str | Sequence[str]) -> tuple[str, ...]:
    """Return the datasets in `dataset_name_or_path`, a list or names separated by commas.

    Raises:
        ValueError: there is no name, or a name is empty.
    """
    if not isinstance(dataset_name_or_path, str):
        names = tuple(dataset_name_or_path)
    elif "," not in dataset_name_or_path or Path(dataset_name_or_path).expanduser().exists():
        names = (dataset_name_or_path,)
    else:
        names = tuple(name.strip() for name in dataset_name_or_path.split(","))
    if not names or not all(names):
        raise ValueError(f"dataset_name_or_path: {dataset_name_or_path!r} has an empty name; separate names by commas")
    return names


class MissingSplitError(ValueError):
    """Error about a split that an existing dataset lacks."""


def open_dataset(config: DataConfig, split: str, is_stream: bool = False) -> list[Reader]:
    """Return the readers of one split of the datasets that a configuration names.

    Raises:
        ValueError: no dataset is named, or as for `open_splits`.
    """
    if config.dataset_name_or_path is None:
        known = ", ".join(BUILTIN_NAMES)
        raise ValueError(f"dataset_name_or_path: not set; use a directory or a built-in dataset ({known})")
    return open_splits(dataset_names(config.dataset_name_or_path), split, config.task_name, is_stream)


def title_of(config: DataConfig, readers: Sequence[Reader]) -> str:
    """Return the dataset names of a configuration, or the names of the readers if it names no dataset."""
    written = config.dataset_name_or_path
    return ", ".join([reader.name for reader in readers] if written is None else dataset_names(written))


def open_splits(
    names: Sequence[str], split: str, task_name: str | None = None, is_stream: bool = False
) -> list[Reader]:
    """Return the readers of a split of several datasets; a dataset without a dev split is left out.

    The arguments are passed on to `open_split`.

    Raises:
        ValueError: as for `open_split`; or no dataset has a dev split.
    """
    readers: list[Reader] = []
    missing: MissingSplitError | None = None
    for name in names:
        try:
            readers += open_split(name, split, task_name, is_stream)
        except MissingSplitError as error:
            if split == "train":
                raise
            missing = missing or error
    if missing is not None and not readers:
        raise missing
    return readers


def open_split(name: str, split: str, task_name: str | None = None, is_stream: bool = False) -> list[Reader]:
    """Return the readers of a split of a dataset, in reading order.

    Args:
        name: a directory, a built-in name or a hub id.
        split: "train" or "dev".
        task_name: configuration of a hub data set.
        is_stream: whether to read a hub data set during its download.

    Raises:
        ValueError: the dataset does not exist, lacks the split, or holds it twice.
    """
    assert split in SPLITS, split
    if name in BUILTIN_NAMES and not task_name:
        return [InflectionReader(split)]
    folder = _find_folder(name)
    if is_saved_dataset(folder) or (not folder.exists() and is_hub_id(name)):
        return [HubReader(name, split, task_name, is_stream)]
    if task_name:
        raise ValueError(
            f"task_name: {task_name!r} selects a configuration of a hub data set, but {name!r} is not one; remove it"
        )
    return [open_reader(path) for path in find_files(name, split)]


def open_reader(path: Path) -> Reader:
    """Return the reader of a file; an unknown suffix means JSON lines."""
    suffix = suffix_of(path)
    return READERS.get(suffix if suffix in READERS.names() else "")(path)


def find_files(dataset_name_or_path: str, split: str) -> list[Path]:
    """Return the files of a split in a directory, sorted by name; the path of a file is accepted as a dev split.

    Raises:
        ValueError: the directory does not exist, lacks the split, or holds it twice.
    """
    folder = _find_folder(dataset_name_or_path)
    if split == "dev" and folder.is_file() and folder.name.endswith(known_suffixes()):
        return [folder]
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "is neither a directory nor a built-in dataset"
        raise ValueError(
            f"dataset_name_or_path: {dataset_name_or_path!r} {what}{did_you_mean(dataset_name_or_path, BUILTIN_NAMES)} "
            "Use a directory with train.json and dev.json (one JSON object per line), or a hub id (owner/name); built "
            f"in: {', '.join(BUILTIN_NAMES)}"
        )
    suffixes = known_suffixes()
    single = [folder / f"{split}{suffix}" for suffix in suffixes]
    present = [path for path in single if path.is_file()]
    many = sorted(path for path in (folder / split).glob("*") if path.name.endswith(suffixes) and path.is_file())
    if len(present) + bool(many) > 1:
        named = ", ".join(str(path) for path in [*present, *many[:1]])
        raise ValueError(f"{folder}: the split {split!r} exists more than once: {named}; keep one")
    if not present and not many:
        looked_for = ", ".join(str(path) for path in [*single, *(folder / split / f"*{s}" for s in suffixes)])
        raise MissingSplitError(f"{folder}: no {split!r} split; add one of {looked_for}")
    return present or many


def _find_folder(dataset_name_or_path: str) -> Path:
    """Return the path of a dataset's directory, which may not exist.

    `AdvertiseGen` is also looked for where PaddleNLP downloads it: `$PPNLP_HOME/datasets`, by default
    `~/.paddlenlp/datasets`.

    Raises:
        ValueError: `AdvertiseGen` is in neither place.
    """
    folder = Path(dataset_name_or_path).expanduser()
    if dataset_name_or_path != ADVERTISE_GEN or folder.is_dir():
        return folder
    home = os.environ.get("PPNLP_HOME") or Path.home() / ".paddlenlp"
    downloaded = Path(home).expanduser() / "datasets" / ADVERTISE_GEN
    if not downloaded.is_dir():
        raise ValueError(
            f"dataset_name_or_path: {ADVERTISE_GEN} is not distributed with the package, and neither "
            f"{folder.absolute()} nor {downloaded} exists; docs/data.md says where to get it"
        )
    return downloaded


def read_rows(path: Path) -> Iterator[SourceRow | InvalidRow]:
    """Yield every row of a file, with an `InvalidRow` for each unreadable row; blank lines are not rows."""
    return open_reader(path).rows()
