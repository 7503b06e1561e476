"""Wrong values in the files of a tokenizer."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.stress.wrong_values import damage, mutate

_FILES = ("tokenizer.json", "tokenizer_config.json")


@functools.cache
def _contents() -> dict[str, str]:
    """Return the files of a tokenizer."""
    tokenizer = make_tokenizer(bos="<s>")
    tokenizer.chat_template = CHATML
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {name: (Path(folder) / name).read_text() for name in _FILES}


def attack(rng: random.Random, folder: Path) -> list[int]:
    """Load the tokenizer with one wrong file, and encode a text."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    wrong = rng.choice(_FILES)
    for name, content in _contents().items():
        data = content.encode()
        if name == wrong:
            extra = ("auto_map", "tokenizer_class", "extra_special_tokens", "model_max_length", "added_tokens_decoder")
            is_json = rng.random() < 0.7
            data = json.dumps(mutate(json.loads(content), rng, extra)).encode() if is_json else damage(data, rng)
        (folder / name).write_bytes(data)
    return load_tokenizer(folder).encode("a b <s>")
