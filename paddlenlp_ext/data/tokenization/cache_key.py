"""Compute the key of a split in the token cache."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paddlenlp_ext.data.readers.base import Reader

TOKENIZATION_VERSION = 4
"""Version of the tokenization, part of the cache key; increment it with every change that alters the tokens of a row.

`tests/data/test_tokenization_version.py` compares the tokens of fixed rows with a digest recorded for this version.
"""
_PLAIN_KEYS = frozenset(
    {b"src", b"tgt", b"messages", b"role", b"content", b"conversations", b"from", b"value", b"system", b"text"}
)
"""Row keys with the same meaning in tokenization versions 1 to 4. The caches of version 1 stay valid for files that
contain no other keys."""
_V1_FILE = Path(__file__).parent / "tokenization_v1.json"
"""File with the last package version and source hashes that tokenization version 1 wrote into cache keys."""


def cache_key(
    *,
    readers: Sequence[Reader],
    tokenizer: str,
    template_text: str,
    options: Mapping[str, Any],
    reads_more: bool = False,
) -> str:
    """Return a hash of everything that determines the tokens of a split.

    Args:
        readers: readers of the data files in reading order; the hash covers their paths, as written, and contents.
        tokenizer: the result of `tokenizer_fingerprint`.
        template_text: `identity` of the chat template.
        options: configuration values that change the tokens.
        reads_more: whether tokenization version 1 may have dropped rows that are now valid, such as rows with
            consecutive questions.
    """
    keys = [_PlainKeys() for _ in readers]
    parts: dict[str, Any] = {
        "files": [reader.fingerprint(seen.observe) for reader, seen in zip(readers, keys, strict=True)],
        "tokenizer": tokenizer,
        "template": template_text,
        "options": dict(options),
    }
    # `are_plain` is known, because `fingerprint` has passed the content of the files to `observe`.
    is_plain = all(reader.is_json_text and seen.are_plain for reader, seen in zip(readers, keys, strict=True))
    parts |= version_entries(is_plain and not reads_more)
    return _hash(json.dumps(parts, sort_keys=True).encode())


def version_entries(has_plain_keys: bool) -> dict[str, Any]:
    """Return the tokenization version and the library versions, as entries of a key.

    Args:
        has_plain_keys: whether tokenization version 1 gives the same tokens, because the rows have only `_PLAIN_KEYS`.
    """
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    if has_plain_keys and TOKENIZATION_VERSION == 4:
        first = json.loads(_V1_FILE.read_text(encoding="utf-8"))
        return {"code": first["code"], "versions": [first["package"], *libraries]}
    return {"code": TOKENIZATION_VERSION, "versions": libraries}


_THOUGHT_END = re.compile(rb"<\\?/think>")
_LONG_TEXT = re.compile(rb'[^"]{128,}')


def _shortened(text: re.Match[bytes]) -> bytes:
    """Shorten a long text between quotes; whitespace stays whitespace, and other text does not become a plain key."""
    return b" " if text[0].isspace() else b"x" * 64 + text[0][-16:]


class _PlainKeys:
    """Incremental scanner of JSON text for keys outside `_PLAIN_KEYS` and for reasoning in `<think>` tags.

    Text that looks like a key counts as a key even inside a string. Tokenization version 4 treats reasoning differently
    from version 1: it excludes empty reasoning from the loss.

    Attributes:
        are_plain: whether the scanned text has only plain keys and no reasoning.
    """

    def __init__(self) -> None:
        self.are_plain = True
        self._rest = b""

    def observe(self, content: bytes) -> None:
        if not self.are_plain:
            return
        text, end = self._rest + content, 0
        if _THOUGHT_END.search(text):
            self.are_plain = False
            return
        for match in re.finditer(rb'"([^"]*)"\s*:', text):
            end = match.end()
            if match[1] not in _PLAIN_KEYS:
                self.are_plain = False
                return
        # A key may start at one of the last two quotes and end in the next chunk.
        last = text.rfind(b'"', end)
        before = text.rfind(b'"', end, max(last, end))
        begins = [quote for quote in (before, last) if quote >= 0]
        self._rest = _LONG_TEXT.sub(_shortened, text[begins[0] :]) if begins else b""


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of everything that determines how a tokenizer encodes text, excluding its path and padding."""
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    parts: dict[str, Any] = {"class": type(tokenizer).__name__, "special": special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        parts["backend"] = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    else:
        parts["vocabulary"] = tokenizer.get_vocab()
        parts["added"] = {str(index): str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        # Only the model file of SentencePiece contains the merge scores.
        model_file = getattr(tokenizer, "vocab_file", None)
        parts["model"] = _hash(Path(model_file).read_bytes()) if model_file else None
    return _hash(json.dumps(parts, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
