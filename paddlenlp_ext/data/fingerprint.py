"""The name of a tokenized dataset: a hash of everything that it depends on, and of nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import paddlenlp_ext

ROOM = Path(__file__).parent


def cache_key(
    *, files: Sequence[Path], tokenizer: str, template_text: str, options: Mapping[str, Any], room: Path = ROOM
) -> str:
    """Hash of names and contents of the files, tokenizer, template, options, and the code that puts them together.

    Args:
        files: what the rows are read from, in order.
        tokenizer: its `tokenizer_fingerprint`.
        template_text: the chat template's `identity`.
        options: whatever of the configuration changes which tokens come out.
        room: folder whose Python files are the code.
    """
    parts = {
        "files": [(str(path), _hash(path.read_bytes())) for path in files],
        "tokenizer": tokenizer,
        "template": template_text,
        "options": dict(options),
        **code_facts(room),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())


def code_facts(*rooms: Path) -> dict[str, Any]:
    """What runs: the content of the folders' Python files, and the versions of the libraries under them."""
    return {
        "code": [(path.name, _hash(path.read_bytes())) for room in rooms for path in sorted(room.glob("*.py"))],
        "versions": [paddlenlp_ext.__version__, version("tokenizers"), version("transformers"), version("jinja2")],
    }


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of what the tokenizer does to a text; not of where it was loaded from, or how it would pad."""
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    parts: dict[str, Any] = {"class": type(tokenizer).__name__, "special": special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        parts["backend"] = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    else:
        parts["vocabulary"] = tokenizer.get_vocab()
        parts["added"] = {str(index): str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        # A SentencePiece model's merge scores stand in its file only.
        model_file = getattr(tokenizer, "vocab_file", None)
        parts["model"] = _hash(Path(model_file).read_bytes()) if model_file else None
    return _hash(json.dumps(parts, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
