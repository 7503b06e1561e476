"""Find the files of a dataset and open their readers.

A dataset is a file, a directory, the name of a built-in dataset, or a dataset on the Hugging Face hub. `splits.py`
lists the names of the splits in a directory. The suffix of a file selects its format. Without `train_dataset_prob`,
several datasets are read one after the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.base import READERS, Reader, known_suffixes, suffix_of
from paddlenlp_ext.data.readers.column_mapping import RenamedReader
from paddlenlp_ext.data.readers.dataset_info import registered_dataset, registered_names
from paddlenlp_ext.data.readers.held_out import OneSideReader, held_out_ratio
from paddlenlp_ext.data.readers.hub import HubReader, is_hub_id
from paddlenlp_ext.data.readers.in_memory import InMemoryReader, Rows
from paddlenlp_ext.data.readers.inflection import InflectionReader
from paddlenlp_ext.data.readers.splits import SPLITS, MissingSplitError, choose_split
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.json_reader import IN_MEMORY
from paddlenlp_ext.utils.suggest import did_you_mean

ADVERTISE_GEN = "AdvertiseGen"
"""Dataset of PaddleNLP's examples, which users download themselves."""
BUILTIN_NAMES = ("inflection",)
_SAVED = "state.json"
"""File that marks a folder written by `Dataset.save_to_disk`."""


def dataset_names(dataset_name_or_path: str | Sequence[str]) -> tuple[str, ...]:
    """Return the dataset names in `dataset_name_or_path`: a list, or a string with names separated by commas.

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
        raise ValueError(
            f"dataset_name_or_path: {dataset_name_or_path!r} has an empty name; separate names with commas"
        )
    return names


def open_dataset(config: DataConfig, split: str, is_stream: bool = False, rows: Rows | None = None) -> list[Reader]:
    """Return the readers of a split of the configured datasets, or of rows in memory.

    A single file holds training rows; a single file that `eval_dataset_path` names holds evaluation rows.
    `column_mapping` renames columns. With `dev_ratio`, the splits "train" and "dev" are parts of the training rows.

    Raises:
        ValueError: `dataset_name_or_path` is not set, a dataset has a dev split although `dev_ratio` is set, or
            `open_splits` or `RenamedReader` raises a ValueError.
    """
    holds_out = config.dev_ratio > 0 and split in ("train", "dev")
    if rows is not None:
        readers: list[Reader] = [InMemoryReader(rows)]
    elif holds_out:
        readers = _open_configured(config, "train", is_stream)
        _check_no_dev_split(config)
    else:
        readers = _open_configured(config, split, is_stream)
    if (mapping := config.column_mapping) is not None:
        readers = [RenamedReader(reader, mapping) for reader in readers]
    if not holds_out:
        return readers
    ratio = held_out_ratio(config.dev_ratio, readers)
    return [OneSideReader(reader, ratio, split == "dev", config.dev_ratio) for reader in readers]


def _check_no_dev_split(config: DataConfig) -> None:
    """Check that no dataset has an eval split, so that `dev_ratio` is the only source of eval rows."""
    assert config.dataset_name_or_path is not None, "the training rows must have been opened"
    for name in dataset_names(config.dataset_name_or_path):
        if name not in BUILTIN_NAMES and _has_no_splits(_find_folder(name)):
            continue
        try:
            open_split(name, "dev, not test", config.task_name)
        except MissingSplitError:
            continue
        raise ValueError(
            f"dev_ratio: {name} has a dev split; remove dev_ratio, or set dataset_name_or_path to the file of the "
            "training rows"
        )


def _open_configured(config: DataConfig, split: str, is_stream: bool) -> list[Reader]:
    if config.dataset_name_or_path is None:
        known = ", ".join(BUILTIN_NAMES)
        raise ValueError(f"dataset_name_or_path: not set; use a file, a directory or a built-in dataset ({known})")
    if split == "test" and config.dataset_name_or_path == IN_MEMORY:
        raise MissingSplitError(
            'do_predict: rows in memory have no test split; pass test rows as a dev set, eval_dataset={"test": rows}'
        )
    names = dataset_names(config.dataset_name_or_path)
    if split == "test" or (split == "dev" and config.eval_dataset_path is None):
        files = [name for name in names if _has_no_splits(_find_folder(name))]
        names = tuple(name for name in names if name not in files)
        if not names:
            needed = "eval_dataset_path: not set, and" if split == "dev" else "do_predict: needs test rows, and"
            remedy = (
                "set eval_dataset_path to a file or folder, set dev_ratio to hold out rows, or set do_eval to false"
                if split == "dev"
                else "use a folder with test.json, or set do_predict to false"
            )
            raise MissingSplitError(f"{needed} the rows of {', '.join(files)} are training rows; {remedy}")
    return open_splits(names, split, config.task_name, is_stream)


def title_of(config: DataConfig, readers: Sequence[Reader]) -> str:
    """Return the configured dataset names, or the names of the readers if `dataset_name_or_path` is not set."""
    written = config.dataset_name_or_path
    return ", ".join([reader.name for reader in readers] if written is None else dataset_names(written))


def open_splits(
    names: Sequence[str], split: str, task_name: str | None = None, is_stream: bool = False
) -> list[Reader]:
    """Return the readers of a split of several datasets; datasets without a dev or test split are skipped.

    Args:
        names: names of the datasets.
        split, task_name, is_stream: see `open_split`.

    Raises:
        ValueError: `open_split` raises a ValueError, or no dataset has the split.
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
        name: a file, a directory, a name in a dataset_info.json, a built-in name or a hub id.
        split: "train", "dev" or "test".
        task_name: configuration of a hub dataset.
        is_stream: whether to read a hub dataset during its download.

    Raises:
        ValueError: the dataset does not exist, lacks the split, or contains the split twice.
    """
    assert split in SPLITS, split
    if name in BUILTIN_NAMES and not task_name:
        if split == "test":
            raise MissingSplitError(f"do_predict: {name} has no test rows; set do_eval instead of do_predict")
        return [InflectionReader(split)]
    if not _find_folder(name).exists() and is_hub_id(name):
        return [HubReader(name, split, task_name, is_stream)]
    if task_name:
        raise ValueError(
            f"task_name: {task_name!r} selects a configuration of a hub dataset, but {name!r} is not a hub dataset; "
            "remove task_name"
        )
    readers = [open_reader(path) for path in find_files(name, split)]
    registered = registered_dataset(Path(name).expanduser())
    if registered is None or not registered.columns:
        return readers
    key = f"{registered.place}: columns"
    return [RenamedReader(reader, registered.columns, key, is_complete=True) for reader in readers]


def open_reader(path: Path) -> Reader:
    """Return the reader of a file; an unknown suffix means JSON Lines."""
    suffix = suffix_of(path)
    return READERS.get(suffix if suffix in READERS.names() else "")(path)


def find_files(dataset_name_or_path: str, split: str) -> list[Path]:
    """Return the files of a split of a dataset, in reading order; a path to a single file is accepted for any split.

    Raises:
        ValueError: the path does not exist, the directory lacks the split or contains it twice, or files are missing.
    """
    folder = _find_folder(dataset_name_or_path)
    if _has_no_splits(folder):
        return _files_of(folder)
    if not folder.is_dir():
        raise ValueError(
            f"dataset_name_or_path: {dataset_name_or_path!r} is neither a file, a directory nor a built-in dataset"
            f"{did_you_mean(dataset_name_or_path, BUILTIN_NAMES)} Use a file, a directory with train.json and dev.json "
            f"(one JSON object per line), or a hub id (owner/name); built in: {', '.join(BUILTIN_NAMES)}"
        )
    names = [name for group in SPLITS[split] for name in group]
    found = {name: layouts for name in names if (layouts := _layouts(folder, name))}
    try:
        name = choose_split(split, found, str(folder))
    except MissingSplitError as error:
        looked_for = ", ".join(str(folder / f"{split}{end}") for end in (*known_suffixes(), "/*", "-00000-of-00001.*"))
        otherwise = ", or set do_predict to false" if split == "test" else ""
        if registered := registered_names(folder):
            named = ", ".join(str(folder / name) for name in registered)
            otherwise = f"{otherwise}; dataset_info.json has the datasets {named}"
        raise MissingSplitError(
            f"{error}; add one of {looked_for}, or the same file in {folder / 'data'}{otherwise}"
        ) from None
    if len(found[name]) > 1:
        named = ", ".join(str(files[0]) for files in found[name])
        raise ValueError(f"{folder}: the split {name!r} exists more than once: {named}; keep one")
    return found[name][0]


def _layouts(folder: Path, name: str) -> list[list[Path]]:
    """Return the files of a split, one list for each layout in which the directory has the split.

    The layouts are NAME.json, NAME/*.json and NAME-00000-of-00002.json, with any supported suffix, in the directory and
    its subdirectory `data`, as in repositories of the hub.
    """
    layouts = []
    for base in (folder, folder / "data"):
        layouts += [[path] for suffix in known_suffixes() if (path := base / f"{name}{suffix}").is_file()]
        layouts += [files for files in (_files_of(base / name), _numbered_files(base, name)) if files]
    return layouts


def _files_of(path: Path) -> list[Path]:
    """Return the data files of a path: the file itself, or the files of a directory.

    Raises:
        ValueError: files are missing, or the directory has an index file that selects some of the rows (written by old
            releases of `datasets`).
    """
    if path.is_file():
        return [path]
    if not (path / _SAVED).is_file():
        return sorted(file for file in path.glob("*") if file.name.endswith(known_suffixes()) and file.is_file())
    state = read_json_object(path / _SAVED)
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{path}: an index file selects some of the stored rows; save the dataset again with datasets 2 or later"
        )
    files = [path / str(entry["filename"]) for entry in state.get("_data_files", ())]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{path / _SAVED}: missing files: {', '.join(missing) or 'all'}; save the dataset again")
    return files


def _numbered_files(folder: Path, name: str) -> list[Path]:
    """Return the files NAME-00000-of-00002.parquet, ... of a split.

    Raises:
        ValueError: files are missing.
    """
    pattern = re.compile(rf"{name}-\d+-of-(\d+)(-\w+)?\.")
    found = {
        path: match
        for path in sorted(folder.glob(f"{name}-*"))
        if (match := pattern.match(path.name)) and path.name.endswith(known_suffixes())
    }
    totals = {int(match[1]) for match in found.values()}
    if totals - {len(found)}:
        raise ValueError(
            f"{folder}: found {len(found)} files {name}-*-of-*, but {max(totals)} are expected according to their "
            "names; download the dataset again"
        )
    return list(found)


def _has_no_splits(path: Path) -> bool:
    """Return whether a path is a file, or a directory that `Dataset.save_to_disk` wrote for a single split."""
    return path.is_file() or (path / _SAVED).is_file()


def _find_folder(dataset_name_or_path: str) -> Path:
    """Return the path of a dataset, a file or a directory, without checking that the path exists.

    A name in LLaMA-Factory's dataset_info.json, such as `data/demo`, has the path of its entry. If there is no
    directory `AdvertiseGen`, the download directory of PaddleNLP is searched for the dataset: `$PPNLP_HOME/datasets`,
    by default `~/.paddlenlp/datasets`.

    Raises:
        ValueError: the dataset is `AdvertiseGen`, and neither directory exists; or the path does not exist, and the
            dataset_info.json beside it has other datasets.
    """
    folder = Path(dataset_name_or_path).expanduser()
    if dataset_name_or_path != ADVERTISE_GEN or folder.is_dir():
        if (registered := registered_dataset(folder)) is not None:
            return registered.path
        if not folder.exists() and dataset_name_or_path not in BUILTIN_NAMES:
            _check_registered(folder)
        return folder
    home = os.environ.get("PPNLP_HOME") or Path.home() / ".paddlenlp"
    downloaded = Path(home).expanduser() / "datasets" / ADVERTISE_GEN
    if not downloaded.is_dir():
        raise ValueError(
            f"dataset_name_or_path: {ADVERTISE_GEN} is not distributed with the package, and neither "
            f"{folder.absolute()} nor {downloaded} exists; docs/reference/data_formats.md says where to download it"
        )
    return downloaded


def _check_registered(path: Path) -> None:
    """Check that a path without an entry has no dataset_info.json beside it: the name is mistyped, not a hub id."""
    if names := registered_names(path.parent):
        raise ValueError(
            f"dataset_name_or_path: {str(path)!r} is neither a path nor a dataset of "
            f"{path.parent / 'dataset_info.json'}{did_you_mean(path.name, names)} Datasets: {', '.join(names)}"
        )


def read_rows(path: Path) -> Iterator[SourceRow | InvalidRow]:
    """Yield every row of a file, with an `InvalidRow` for each unreadable row; blank lines are not rows."""
    return open_reader(path).rows()
