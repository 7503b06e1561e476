"""Wrong values in the files of a tokenizer, and components that make texts longer."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.data.templates.text_encoder import TextEncoder
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.stress.wrong_values import damage, mutate

_FILES = ("tokenizer.json", "tokenizer_config.json")


_COMPONENTS = (
    *({"type": "Replace", "pattern": {"String": text}, "content": "aa"} for text in ("a", "aa", "")),
    *({"type": "Replace", "pattern": {"Regex": text}, "content": "a" * 9} for text in ("", ".", "(a+a+)+b")),
    *({"type": "Prepend", "prepend": "a" * length} for length in (0, 1, 100)),
    *({"type": name} for name in ("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
    {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAAYQBiYmIA"},
)


def _growing(rng: random.Random) -> dict[str, Any]:
    """Return a sequence of normalizers, many of which make texts longer."""
    return {"type": "Sequence", "normalizers": rng.choices(_COMPONENTS, k=rng.randrange(12))}


@functools.cache
def _contents() -> dict[str, str]:
    """Return the files of a tokenizer."""
    tokenizer = make_tokenizer(bos="<s>")
    tokenizer.chat_template = CHATML
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {name: (Path(folder) / name).read_text() for name in _FILES}


def attack(rng: random.Random, folder: Path) -> list[list[int]]:
    """Load the tokenizer with one wrong file, and encode texts."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    wrong = rng.choice((*_FILES, "normalizer"))
    for name, content in _contents().items():
        data = content.encode()
        if name == wrong:
            extra = ("auto_map", "tokenizer_class", "extra_special_tokens", "model_max_length", "added_tokens_decoder")
            is_json = rng.random() < 0.7
            data = json.dumps(mutate(json.loads(content), rng, extra)).encode() if is_json else damage(data, rng)
        if wrong == "normalizer" and name == "tokenizer.json":
            data = json.dumps(json.loads(content) | {"normalizer": _growing(rng)}).encode()
        (folder / name).write_bytes(data)
    return TextEncoder(load_tokenizer(folder)).encode(["a b <s>", "a" * 100], [False, True])
