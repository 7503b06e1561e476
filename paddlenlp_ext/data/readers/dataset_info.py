"""Find datasets that LLaMA-Factory's dataset_info.json registers by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.rows.conversation import ASSISTANT, SYSTEM, TOOL, USER
from paddlenlp_ext.data.rows.parse_messages import OPENAI_ROLES, SHAREGPT_ROLES
from paddlenlp_ext.utils.files import read_json_object

_FILE = "dataset_info.json"
_SOURCES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""Name of a column in an entry with the formatting alpaca -> field of rows, if the names differ."""
_MESSAGES = {("from", "value"): ("conversations", SHAREGPT_ROLES), ("role", "content"): ("messages", OPENAI_ROLES)}
"""Keys of the role and the text of a message -> field with the messages of a row, and its roles."""
_DEFAULT = {"messages": "conversations"}
_ROLE_TAGS = {
    "user_tag": USER,
    "assistant_tag": ASSISTANT,
    "system_tag": SYSTEM,
    "observation_tag": TOOL,
    "function_tag": ASSISTANT,
}


@dataclass(frozen=True)
class RegisteredDataset:
    """Dataset in a dataset_info.json.

    Attributes:
        path: file or folder with the rows.
        columns: column of the file -> field of a row format, for all columns that are read; empty if the entry names no
            column, so that the format of the rows is detected.
        place: file and name of the entry, for errors.
    """

    path: Path
    columns: Mapping[str, str]
    place: str


def registered_dataset(path: Path) -> RegisteredDataset | None:
    """Return the dataset that dataset_info.json registers under the last component of a path.

    `data/demo` is the dataset `demo` of `data/dataset_info.json`. The result is None if the path exists or has no
    entry.

    Raises:
        ValueError: the entry names no existing file, samples rows, or has a formatting, columns or tags that are not
            supported.
    """
    entry = None if path.exists() else _entries(path.parent).get(path.name)
    if entry is None:
        return None
    place = f"{path.parent / _FILE}: {path.name}"
    if "file_name" not in entry:
        raise ValueError(f"{place}: no file_name; set dataset_name_or_path to the hub id, or to a file with the rows")
    if entry.get("num_samples") is not None:
        raise ValueError(f"{place}: num_samples is not supported; remove it, and write the chosen rows to a file")
    file = path.parent / str(entry["file_name"])
    if not file.exists():
        raise ValueError(f"{place}: file_name: {file} does not exist; restore the file, or correct the entry")
    return RegisteredDataset(file, _columns(entry, place), place)


def registered_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the datasets in the dataset_info.json of a folder."""
    return tuple(_entries(folder))


def _entries(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the entries by name. A dataset_info.json that `Dataset.save_to_disk` wrote has no entries."""
    if not (folder / _FILE).is_file():
        return {}
    registered = read_json_object(folder / _FILE).items()
    return {
        name: entry
        for name, entry in registered
        if isinstance(entry, dict) and any(source in entry for source in _SOURCES)
    }


def _columns(entry: Mapping[str, Any], place: str) -> dict[str, str]:
    """Return the columns that are read, and the fields that they hold."""
    formatting, written = entry.get("formatting", "alpaca"), _texts(entry, "columns", place)
    if formatting == "alpaca":
        fields = {"prompt": "text"} if set(written) == {"prompt"} else _ALPACA  # a prompt alone is plain text
    elif formatting in ("sharegpt", "openai"):
        fields, written = {"messages": _messages_field(_texts(entry, "tags", place), place)}, {**_DEFAULT, **written}
    else:
        raise ValueError(f"{place}: formatting {formatting!r} is not supported; use alpaca, sharegpt or openai")
    return {column: fields.get(name, name) for name, column in written.items()}


def _texts(entry: Mapping[str, Any], key: str, place: str) -> dict[str, str]:
    """Return an object in an entry whose values are texts; null values are left out.

    Raises:
        ValueError: the value is not an object, or has a value that is not a text.
    """
    values = entry.get(key) or {}
    if not isinstance(values, dict) or not all(isinstance(value, str | None) for value in values.values()):
        raise ValueError(f"{place}: {key} must be an object whose values are texts")
    return {name: value for name, value in values.items() if value}


def _messages_field(tags: Mapping[str, str], place: str) -> str:
    """Return the field of a row format whose messages have these keys and roles."""
    keys = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    field, roles = _MESSAGES.get(keys, ("", {}))
    unknown = [tag for tag, role in _ROLE_TAGS.items() if tag in tags and roles.get(tags[tag]) != role]
    if not field or unknown:
        problem = f"role_tag, content_tag {keys}" if not field else f"{unknown[0]} {tags[unknown[0]]!r}"
        raise ValueError(
            f"{place}: {problem} is not supported; write messages with from and value (human, gpt), or with role and "
            "content (user, assistant)"
        )
    return field
