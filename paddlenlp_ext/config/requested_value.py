"""Read one key of a command line and its configuration files before the slow import of Paddle.

The complete check of the configuration imports Paddle, because it needs the keys that the adapter methods declare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.config.command_line import read_command_line
from paddlenlp_ext.config.config_files import read_file
from paddlenlp_ext.config.dataclass_options import convert
from paddlenlp_ext.config.known_keys import known_keys


def requested_value(argv: Sequence[str], key: str) -> Any:
    """Return the last value of a key; None if the key is not written or its value is invalid. Ignore other problems."""
    table = known_keys({})
    line = read_command_line(argv, table)
    settings = [setting for path in line.files for setting in read_file(path)[0]] + line.settings
    written = [setting for setting in settings if setting.key == key and setting.value is not None]
    if not written:
        return None
    try:
        return convert(table.options[key], written[-1].value, written[-1].from_command_line)
    except ValueError:  # the complete check reports the invalid value
        return None
