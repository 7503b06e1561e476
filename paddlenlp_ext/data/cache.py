"""Tokenized rows on disk: arrays that are mapped, not read, and the account beside them.

The name of a tokenized dataset: a hash of everything that it depends on, and of nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import paddlenlp_ext
from paddlenlp_ext.data.tokenize import TokenizedRow
from paddlenlp_ext.data.types import DataAccount
from paddlenlp_ext.utils import json_reader
from paddlenlp_ext.utils.files import atomic_folder
from paddlenlp_ext.utils.logging import get_logger

ACCOUNT_FILE = "account.json"


@dataclass(frozen=True)
class TokenStore:
    """All rows of a split, one behind the other.

    Attributes:
        tokens: int32 [all tokens].
        learned: bool [all tokens].
        offsets: int64 [rows + 1]; row i is offsets[i] to offsets[i + 1].
        places: int64 [rows, 3]: number of the file, line, column.
        answers: int64 [rows, 2]: where the last answer of the row begins, counted from the row's first token, and the
            number of its turn.
    """

    tokens: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    answers: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[TokenizedRow], files: Sequence[str]) -> TokenStore:
        """Join rows; `files` gives the files their numbers."""
        number_of = {file: number for number, file in enumerate(files)}
        lengths = [len(row.tokens) for row in rows]
        places = [(number_of[row.place.file], row.place.line, row.place.column) for row in rows]
        return cls(
            tokens=np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0, np.int32),
            learned=np.concatenate([row.learned for row in rows]) if rows else np.zeros(0, bool),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            places=np.array(places, dtype=np.int64).reshape(len(rows), 3),
            answers=np.array([(row.answer_start, row.last_turn) for row in rows], dtype=np.int64).reshape(len(rows), 2),
        )

    def save(self, folder: Path) -> None:
        """Write every array to a file of its name."""
        for name, array in vars(self).items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> TokenStore:
        """Map the arrays of `save`.

        Raises:
            ValueError: a file is missing or damaged.
        """
        try:
            names = list(cls.__dataclass_fields__)
            mapped = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names]
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"the tokenized data in {folder} is damaged ({error}); delete that folder") from error
        store = cls(*map(np.asarray, mapped))  # as plain arrays: a slice of a np.memmap takes five times as long
        if len(store.offsets) < 1 or store.offsets[-1] != len(store.tokens):
            raise ValueError(f"the tokenized data in {folder} is damaged (its lengths disagree); delete that folder")
        return store


def load_or_build(folder: Path, build: Callable[[], tuple[TokenStore, DataAccount]]) -> tuple[TokenStore, DataAccount]:
    """What stands in `folder`, built there first if need be. Of several processes one builds, the others wait for it.

    Raises:
        ValueError: what stands there is damaged; and whatever `build` raises, in which case nothing is left behind.
    """
    with file_lock(folder):
        if not folder.is_dir():
            store, account = build()
            with atomic_folder(folder) as draft:
                store.save(draft)
                (draft / ACCOUNT_FILE).write_text(json.dumps(account.to_json(), indent=1), encoding="utf-8")
            get_logger().info("tokenized data written to %s", folder)
        else:
            get_logger().info("tokenized data found in %s", folder)
    account = DataAccount.from_json(json.loads((folder / ACCOUNT_FILE).read_text(encoding="utf-8")))
    return TokenStore.load(folder), account


@contextmanager
def file_lock(folder: Path) -> Iterator[None]:
    """Hold the lock beside `folder`; the system lets go of it even when the process is killed.

    Raises:
        ValueError: the place can't be written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115 (closed below, behind the message)
    except OSError as error:
        raise ValueError(f"no tokenized data can be kept in {folder.parent} ({error}); set data_cache_dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("another process is making %s: waiting for it", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


TOKENIZATION_VERSION = 1
"""Version of the tokens that rows become. Raise it with every change that gives other tokens for the same rows.

`tests/data/test_tokenization_version.py` compares a digest of such tokens with the one recorded for this version.
"""
_V1_FILE = Path(__file__).parent / "tokenization_v1.json"
"""The `package` version and `code` hashes that stand for version 1 in a key.

Keys once held a hash of each source file of this package. Version 1 keeps the last such list, so that caches written
with it are found.
"""


def cache_key(*, files: Sequence[Path], tokenizer: str, template_text: str, options: Mapping[str, Any]) -> str:
    """Return the hash of everything that decides the tokens of a split.

    Args:
        files: files that the rows are read from, in order; their names and contents count.
        tokenizer: the `tokenizer_fingerprint`.
        template_text: `identity` of the chat template.
        options: configuration values that change which tokens come out.
    """
    parts = {
        "files": [(str(path), _hash(path.read_bytes())) for path in files],
        "tokenizer": tokenizer,
        "template": template_text,
        "options": dict(options),
        **tokenization_facts(),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())


def tokenization_facts() -> dict[str, Any]:
    """Return the part of a key that identifies the tokenizing code: its version and those of its libraries."""
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    if TOKENIZATION_VERSION > 1:
        return {"code": TOKENIZATION_VERSION, "versions": libraries}
    first = json.loads(_V1_FILE.read_text(encoding="utf-8"))
    return {"code": first["code"], "versions": [first["package"], *libraries]}


def code_facts(*rooms: Path) -> dict[str, Any]:
    """What runs: the content of the folders' Python files, and the versions of the libraries under them."""
    files = [Path(json_reader.__file__), *(path for room in rooms for path in sorted(room.rglob("*.py")))]
    return {
        "code": [(path.name, _hash(path.read_bytes())) for path in files],
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
