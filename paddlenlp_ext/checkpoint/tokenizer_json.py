"""Check that no component of tokenizer.json lets a text grow without bound; `tokenizers` does not limit the growth."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.files import read_json_object

FILE = "tokenizer.json"
MAX_GROWTH = 128
"""Maximum factor by which a text may grow in bytes.

A space becomes the three bytes of "▁". The longest text in SentencePiece's normalization of a character has 33 bytes.
"""
_COMPONENTS = ("normalizer", "pre_tokenizer", "decoder")


def check_tokenizer_json(folder: Path) -> None:
    """Check the components of tokenizer.json if the file exists.

    Raises:
        ValueError: the file is damaged, or a component may make a text more than `MAX_GROWTH` times longer.
    """
    file = folder / FILE
    if not file.is_file():
        return
    content = read_json_object(file)
    for name in _COMPONENTS:
        growth = 1
        for part in _parts(content.get(name)):
            growth *= max(_growth(part), 1)
            if growth > MAX_GROWTH:
                raise ValueError(
                    f"{file}: {name} may make a text {growth:,} times longer, more than {MAX_GROWTH}; use the files of "
                    "another tokenizer"
                )


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects in a component, which may be a sequence of components."""
    remaining = [component]
    while remaining:
        part = remaining.pop()
        if isinstance(part, dict):
            yield part
            remaining += part.values()
        elif isinstance(part, list):
            remaining += part


def _growth(part: dict[str, Any]) -> int:
    """Return how many times longer one component may make a text, in bytes.

    Components are recognized by their keys, because "type" may be missing. Unicode normalization is not counted,
    because repeated normalization does not make a text longer.
    """
    if "pattern" in part and "content" in part:  # Replace
        pattern = part["pattern"]
        shortest = _num_bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
        return -(-_num_bytes(part["content"]) // max(shortest, 1)) + (shortest == 0)
    if "precompiled_charsmap" in part:
        return _longest_replacement(part["precompiled_charsmap"])
    if "prepend" in part:
        return _num_bytes(part["prepend"])
    if part.get("type") == "ByteLevel" or "trim_offsets" in part:
        return 2
    return 3 if part.get("type") == "Metaspace" or "replacement" in part else 1


def _num_bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _longest_replacement(charsmap: Any) -> int:
    """Return the length of the longest text in a character map of SentencePiece.

    The map has the size of its trie in four bytes, the trie, and texts that end with a zero byte.
    """
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1  # the tokenizers library reports the error
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
