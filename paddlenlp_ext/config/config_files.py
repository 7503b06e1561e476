"""Read the settings of a configuration file, in JSON or YAML, with their locations."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.config.errors import Problem
from paddlenlp_ext.config.json_settings import read_json_settings
from paddlenlp_ext.config.setting import SCHEMA_KEY, Setting
from paddlenlp_ext.utils.json_reader import ENCODING, JsonError, Location, decode_utf8
from paddlenlp_ext.utils.storage_errors import explained_errors

YAML_SUFFIXES = (".yaml", ".yml")
FILE_SUFFIXES = (".json", *YAML_SUFFIXES)
"""Suffixes of configuration files; a file with any other suffix is read as JSON."""
MAX_BYTES = 1 << 20
"""Maximum size of a configuration file in bytes; the largest shipped file is a few kilobytes."""


def read_file(path: str) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of a file up to the first syntax error, and the problems in the file.

    Raises:
        StorageError: the file cannot be read.
    """
    if not Path(path).is_file():
        what = "is a folder, not a JSON or YAML file" if Path(path).is_dir() else "no such file"
        return [], [Problem("", what, Location(path))]
    with explained_errors(path):
        if Path(path).stat().st_size > MAX_BYTES:
            message = f"larger than {MAX_BYTES >> 20} MiB; this is not a configuration file"
            return [], [Problem("", message, Location(path))]
        data = Path(path).read_bytes()
    try:
        text = decode_utf8(data)
    except JsonError as error:
        return [], [_problem(error, path)]
    return read_text(text, path)


def read_text(text: str, path: str) -> tuple[list[Setting], list[Problem]]:
    """Return the settings of a text up to the first syntax error, and the problems: this error and duplicate keys.

    Args:
        text: contents of the file; a byte order mark at the beginning is skipped.
        path: path of the file, whose suffix selects JSON or YAML.
    """
    settings: list[Setting] = []
    problems: list[Problem] = []
    try:
        _read_settings(text.removeprefix("\ufeff"), path, settings)
    except JsonError as error:
        problems.append(_problem(error, path))
    first: dict[str, Setting] = {}
    for setting in settings:
        earlier = first.setdefault(setting.key, setting)
        if earlier is not setting:
            message = f"duplicate key {setting.key!r}, first on line {earlier.location.line}; keep one"
            problems.append(Problem(setting.key, message, setting.location))
    return [setting for setting in first.values() if setting.key != SCHEMA_KEY], problems


def _read_settings(text: str, path: str, settings: list[Setting]) -> None:
    if _is_yaml(path):
        from paddlenlp_ext.config.yaml_settings import read_yaml_settings

        read_yaml_settings(text, Location(path, 1, 1), settings)
    else:
        read_json_settings(text, Location(path, 1, 1), settings)


def _is_yaml(path: str) -> bool:
    return path.lower().endswith(YAML_SUFFIXES)


def _problem(error: JsonError, path: str) -> Problem:
    prefix = "" if error.reason == ENCODING else f"not valid {'YAML' if _is_yaml(path) else 'JSON'}: "
    return Problem("", f"{prefix}{error}", error.location(Location(path, 1, 1)))
