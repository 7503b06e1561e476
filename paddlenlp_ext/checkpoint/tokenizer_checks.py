"""Check the files of a tokenizer before `transformers` and `tokenizers` read them.

| file | why |
| --- | --- |
| tokenizer_config.json | `transformers` does not check the types of values |
| tokenizer.json | `tokenizers` does not limit how much a component may lengthen a text |
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.symlinks import check_links
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.json_schema import (
    FLAG,
    OBJECT,
    TEXT,
    Kind,
    check_values,
    either,
    kinds_by_key,
    list_of,
    number,
    object_of,
    one_of,
)

_TOKEN = either(TEXT, OBJECT)
_TOKENS = list_of(_TOKEN)

KEYS: dict[str, Kind] = kinds_by_key(
    (TEXT.or_null(), "tokenizer_class backend"),
    (
        FLAG.or_null(),
        "add_bos_token add_eos_token add_prefix_space legacy split_special_tokens clean_up_tokenization_spaces "
        "do_lower_case use_default_system_prompt",
    ),
    (_TOKEN.or_null(), "bos_token eos_token unk_token pad_token sep_token cls_token mask_token"),
    (one_of("left", "right").or_null(), "padding_side truncation_side"),
    (_TOKENS.or_null(), "additional_special_tokens"),
    (either(_TOKENS, object_of(_TOKEN)).or_null(), "extra_special_tokens"),
    (either(TEXT, list_of(OBJECT)).or_null(), "chat_template"),
    (number(above=0, maximum=1e32).or_null(), "model_max_length"),  # 1e30: no limit
    (OBJECT.or_null(), "added_tokens_decoder"),
)
TOKEN_KEYS: dict[str, Kind] = kinds_by_key((TEXT, "content"), (FLAG, "lstrip normalized rstrip single_word special"))
"""Keys of a token that is stored as a JSON object."""
MAX_GROWTH = 128
"""Maximum factor by which a text may grow in bytes.

A space becomes the three bytes of "▁". SentencePiece's normalization replaces a character by at most 33 bytes.
"""
_COMPONENTS = ("normalizer", "pre_tokenizer", "decoder")


def check_tokenizer_files(folder: Path) -> None:
    """Check the symlinks of a folder, tokenizer_config.json and tokenizer.json; missing files are skipped.

    Raises:
        ValueError: a file is damaged or a symlink to a file outside the folder, a value of tokenizer_config.json is
            invalid, or a component of tokenizer.json may make a text more than `MAX_GROWTH` times longer.
    """
    check_links(folder)
    config, components = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if config.is_file():
        _check_config(read_json_object(config), config)
    if components.is_file():
        _check_components(read_json_object(components), components)


def _check_config(config: dict[str, Any], file: Path) -> None:
    check_values(config, KEYS, str(file))
    for name, tokens in config.items():
        if name == "added_tokens_decoder":
            for index, token in (tokens or {}).items():
                _check_token(token, f"added_tokens_decoder.{index} in {file}")
        elif name in KEYS and isinstance(tokens, dict) and name.endswith("_token"):
            _check_token(tokens, f"{name} in {file}")
        elif name in ("additional_special_tokens", "extra_special_tokens") and isinstance(tokens, list):
            for index, token in enumerate(tokens):
                if isinstance(token, dict):
                    _check_token(token, f"{name}[{index}] in {file}")


def _check_token(token: object, place: str) -> None:
    if not isinstance(token, dict) or "content" not in token:
        raise ValueError(f'{place} must be an object with "content"')
    check_values(token, TOKEN_KEYS, place)


def _check_components(content: dict[str, Any], file: Path) -> None:
    for name in _COMPONENTS:
        growth = 1
        for part in _parts(content.get(name)):
            growth *= max(_growth(part), 1)
            if growth > MAX_GROWTH:
                raise ValueError(
                    f"{file}: {name} may make a text {growth:,} times longer; the maximum is {MAX_GROWTH}; use the "
                    "files of another tokenizer"
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
    """Return the maximum factor by which one component may lengthen a text, in bytes.

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
    """Return the length in bytes of the longest text in a character map of SentencePiece.

    The map consists of the size of its trie in four bytes, the trie, and zero-terminated texts.
    """
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1  # the tokenizers library reports invalid base64
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
