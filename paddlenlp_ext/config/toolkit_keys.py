"""Keys of transformers, TRL, PEFT, LLaMA-Factory, ms-swift and axolotl, and their counterparts here.

toolkit_keys.json lists the keys in groups of entries. An entry describes one or more keys (`keys`) in one of two ways:

    "is": "max_length"              the keys are other names of this key
    "type", "sets", "neutral",      as in `CompatKey`; null is always neutral, and the default outcome is "not here",
    "outcome", "reason"             an error

A key that a section or an adapter method declares is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

from paddlenlp_ext.config.paddlenlp_keys import compat_keys

_DEFAULTS = {"outcome": "not here"}
TOOLKIT_GROUPS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Title -> entries, in the order of docs/configuration.md."""
_ENTRIES = [entry for group in TOOLKIT_GROUPS.values() for entry in group]
RENAMED_KEYS: dict[str, str] = {key: entry["is"] for entry in _ENTRIES if "is" in entry for key in entry["keys"]}
"""Key of a toolkit -> key with the same meaning."""
ANSWERED_KEYS = tuple(
    compat_keys(
        {**_DEFAULTS, **entry, "neutral": [None, *entry.get("neutral", ())]} for entry in _ENTRIES if "is" not in entry
    )
)
"""Toolkit keys that are translated by value, have no effect or raise an error."""
