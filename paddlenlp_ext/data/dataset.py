"""A split of a dataset, tokenized, and the cache that it is mapped from.

Tokenized rows on disk: arrays that are mapped, not read, and the account beside them.

The name of a tokenized dataset: a hash of everything that it depends on, and of nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections import DataConfig
from paddlenlp_ext.data.formats import parse_row
from paddlenlp_ext.data.inflection import lexicon_path, read_inflection
from paddlenlp_ext.data.sources import find_files, read_rows
from paddlenlp_ext.data.templates import ChatTemplate, load_template
from paddlenlp_ext.data.templates.base import PlainTemplate
from paddlenlp_ext.data.tokenize import LengthLimits, TokenizedRow, encode_rows
from paddlenlp_ext.data.types import MAX_LISTED, DataError, DataStats, EncodedRow, InvalidRow, SourceRow
from paddlenlp_ext.utils.files import atomic_folder, file_lock
from paddlenlp_ext.utils.logging import get_logger

TOKENIZATION_VERSION = 1
"""Version of the tokens that rows become. Raise it with every change that gives other tokens for the same rows.

`tests/data/test_tokenization_version.py` compares a digest of such tokens with the one recorded for this version.
"""
_V1_FILE = Path(__file__).parent / "tokenization_v1.json"
"""The `package` version and `code` hashes that stand for version 1 in a key.

Keys once held a hash of each source file of this package. Version 1 keeps the last such list, so that caches written
with it are found.
"""
STATS_FILE = "account.json"
_ARRAY_FILES = {"loss_mask": "learned", "locations": "places"}
"""Attributes of `TokenArrays` with another name on disk."""
BUILTIN_NAMES = ("inflection",)
DEFAULT_CACHE = Path("~/.cache/paddlenlp_ext/data")

ReadRows = Callable[[], Iterable[SourceRow | InvalidRow]]


class TokenizedDataset:
    """Rows of one split as tokens, mapped from disk.

    Attributes:
        lengths: int64 [rows], the slots every row takes in a batch (its tokens but one).
        account: what became of every row that was read.
    """

    def __init__(
        self,
        store: TokenArrays,
        account: DataStats,
        files: Sequence[str],
        read: ReadRows,
        autoregressive: bool,
    ) -> None:
        self.stats = account
        self.lengths = np.diff(store.offsets) - 1
        self._store = store
        self._files = list(files)
        self._read = read
        self._autoregressive = autoregressive

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedRow:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = self._store.offsets[index : index + 2]
        return EncodedRow(self._store.tokens[start:end], self._store.loss_mask[start:end], int(index))

    def source(self, index: int) -> tuple[str, int]:
        """The file and line that row `index` was read from."""
        file, line, _ = self._store.locations[index]
        return self._files[file], int(line)

    def prompts(self) -> Iterator[tuple[list[int], str, str]]:
        """For generation: (prompt ids, reference answer, question) of the last turn of every row.

        The ids are the row's own, up to where its last answer begins. The texts are read from the source again.

        Raises:
            ValueError: the dataset is plain text, with no answers in it, or a row has no prompt at all.
        """
        if self._autoregressive:
            raise ValueError("rows of plain text (autoregressive) have no prompts to generate from")
        index = 0
        for row in self._read():
            if index == len(self):
                return
            file, line, column = self._store.locations[index]
            place = row.location
            if (place.file, place.line, place.column) != (self._files[file], line, column):
                continue
            start, turn = self._store.answers[index]
            if start == 0:
                raise ValueError(f"{place}: the prompt is empty, there is nothing to generate from; give it a question")
            question, answer = parse_row(row.value).turns[turn]
            yield self[index].tokens[:start].tolist(), answer, question
            index += 1
        assert index == len(self), f"{len(self) - index} rows were not found again in {self._files}"


def load_dataset(
    config: DataConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
) -> TokenizedDataset:
    """Tokenize a split, or find it tokenized.

    Args:
        config: `config.data`.
        split: "train" or "dev".
        tokenizer: a Hugging Face tokenizer.
        template: what `load_template(config.chat_template, tokenizer)` gives; made here if absent.
        fingerprint: the tokenizer's, `data.fingerprint.tokenizer_fingerprint(tokenizer)`; made here if absent.

    Raises:
        ValueError: no such dataset, or no usable row in it.
        DataError: rows are bad and `bad_rows` is "error"; all of them are in it. Or a file breaks off.
    """
    if config.dataset_name_or_path is None:
        known = ", ".join(BUILTIN_NAMES)
        raise ValueError(f"dataset_name_or_path is not set; give a folder or a built-in dataset ({known})")
    if config.task_name:
        raise ValueError(f"task_name is {config.task_name!r}, but no built-in dataset has tasks; remove it")
    files, names, read = _open(config.dataset_name_or_path, split)
    if config.autoregressive:
        template = PlainTemplate(tokenizer)
    elif template is None:
        template = load_template(config.chat_template, tokenizer)
    limits = LengthLimits(config.src_length, config.max_length, config.truncation)
    options = {**vars(limits), "bad_rows": config.bad_rows, "autoregressive": config.autoregressive}
    key = cache_key(
        files=files,
        tokenizer=fingerprint or tokenizer_fingerprint(tokenizer),
        template_text=template.identity,
        options=options,
    )
    folder = cache_dir(config) / f"{split}-{key[:32]}"

    def build() -> tuple[TokenArrays, DataStats]:
        return tokenize(read(), names, template, limits, config.autoregressive, config.bad_rows)

    store, account = load_or_build(folder, build)
    get_logger().info("%s", account.table(f"{split} rows of {config.dataset_name_or_path}"))
    for problem in account.examples:
        get_logger().warning("left out: %s", problem)
    return TokenizedDataset(store, account, names, read, config.autoregressive)


def cache_dir(config: DataConfig) -> Path:
    """Where tokenized data is kept, and what else would be made anew from the same files."""
    return Path(config.data_cache_dir or DEFAULT_CACHE).expanduser()


def tokenize(
    rows: Iterable[SourceRow | InvalidRow],
    files: Sequence[str],
    template: ChatTemplate,
    limits: LengthLimits,
    autoregressive: bool = False,
    bad_rows: str = "error",
) -> tuple[TokenArrays, DataStats]:
    """Encode all rows and account for each.

    Raises:
        DataError: rows are bad and `bad_rows` is "error"; or a file breaks off, whatever `bad_rows` is.
        ValueError: nothing is left.
    """
    results = list(encode_rows(rows, template, limits, autoregressive))
    kept = [row for row in results if not isinstance(row, InvalidRow)]
    left_out = [row for row in results if isinstance(row, InvalidRow)]
    bad = [row for row in left_out if not row.by_policy]
    if bad and bad_rows == "error":
        raise DataError(bad)
    if fatal := [row for row in bad if row.fatal]:
        raise DataError(fatal)
    store = TokenArrays.from_rows(kept, files)
    account = DataStats(
        num_read=len(results),
        num_kept=sum(row.num_truncated_tokens == 0 for row in kept),
        num_truncated=sum(row.num_truncated_tokens > 0 for row in kept),
        num_tokens=len(store.tokens),
        num_target_tokens=int(store.loss_mask.sum()),
        num_tokens_cut=sum(row.num_truncated_tokens for row in kept),
    )
    account.drop(left_out, MAX_LISTED)
    account.check()
    if not kept:
        listed = "".join(f"\n  {problem}" for problem in account.examples)
        raise ValueError(f"no row of {', '.join(files)} can be learned from\n{account.table()}{listed}")
    return store, account


def _open(name_or_path: str, split: str) -> tuple[list[Path], list[str], ReadRows]:
    """The files that decide the content, the names that places use, and how to read the rows."""
    if name_or_path == "inflection":
        path = lexicon_path()
        return [path], [path.name], lambda: read_inflection(split)
    files = find_files(name_or_path, split, BUILTIN_NAMES)
    return files, [str(path) for path in files], lambda: (row for path in files for row in read_rows(path))


@dataclass(frozen=True)
class TokenArrays:
    """All rows of a split, one behind the other.

    Attributes:
        tokens: int32 [all tokens].
        loss_mask: bool [all tokens].
        offsets: int64 [rows + 1]; row i is offsets[i] to offsets[i + 1].
        places: int64 [rows, 3]: number of the file, line, column.
        answers: int64 [rows, 2]: where the last answer of the row begins, counted from the row's first token, and the
            number of its turn.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    locations: np.ndarray
    answers: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[TokenizedRow], files: Sequence[str]) -> TokenArrays:
        """Join rows; `files` gives the files their numbers."""
        number_of = {file: number for number, file in enumerate(files)}
        lengths = [len(row.tokens) for row in rows]
        places = [(number_of[row.location.file], row.location.line, row.location.column) for row in rows]
        return cls(
            tokens=np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0, np.int32),
            loss_mask=np.concatenate([row.loss_mask for row in rows]) if rows else np.zeros(0, bool),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            locations=np.array(places, dtype=np.int64).reshape(len(rows), 3),
            answers=np.array([(row.answer_start, row.last_turn) for row in rows], dtype=np.int64).reshape(len(rows), 2),
        )

    def save(self, folder: Path) -> None:
        """Write every array to a file of its name."""
        for name, array in vars(self).items():
            np.save(folder / _file_name(name), array, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> TokenArrays:
        """Map the arrays of `save`.

        Raises:
            ValueError: a file is missing or damaged.
        """
        try:
            names = list(cls.__dataclass_fields__)
            mapped = [np.load(folder / _file_name(name), mmap_mode="r", allow_pickle=False) for name in names]
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"the tokenized data in {folder} is damaged ({error}); delete that folder") from error
        store = cls(*map(np.asarray, mapped))  # as plain arrays: a slice of a np.memmap takes five times as long
        if len(store.offsets) < 1 or store.offsets[-1] != len(store.tokens):
            raise ValueError(f"the tokenized data in {folder} is damaged (its lengths disagree); delete that folder")
        return store


def _file_name(name: str) -> str:
    return f"{_ARRAY_FILES.get(name, name)}.npy"


def load_or_build(folder: Path, build: Callable[[], tuple[TokenArrays, DataStats]]) -> tuple[TokenArrays, DataStats]:
    """What stands in `folder`, built there first if need be. Of several processes one builds, the others wait for it.

    Raises:
        ValueError: what stands there is damaged; and whatever `build` raises, in which case nothing is left behind.
    """
    with file_lock(folder, "set data_cache_dir"):
        if not folder.is_dir():
            store, account = build()
            with atomic_folder(folder) as draft:
                store.save(draft)
                (draft / STATS_FILE).write_text(json.dumps(account.to_json(), indent=1), encoding="utf-8")
            get_logger().info("tokenized data written to %s", folder)
        else:
            get_logger().info("tokenized data found in %s", folder)
    account = DataStats.from_json(json.loads((folder / STATS_FILE).read_text(encoding="utf-8")))
    return TokenArrays.load(folder), account


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
