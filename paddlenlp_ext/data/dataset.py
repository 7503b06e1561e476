"""A split of a dataset, tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paddlenlp_ext.data.cache import TokenStore, cache_key, load_or_build, tokenizer_fingerprint
from paddlenlp_ext.data.collate import EncodedRow
from paddlenlp_ext.data.formats import parse_row
from paddlenlp_ext.data.inflection import lexicon_path, read_inflection
from paddlenlp_ext.data.sources import find_files, read_rows
from paddlenlp_ext.data.templates import ChatTemplate, load_template
from paddlenlp_ext.data.templates.plain import PlainTemplate
from paddlenlp_ext.data.tokenize import encode_rows
from paddlenlp_ext.data.truncation import Limits
from paddlenlp_ext.data.types import MAX_LISTED, DataAccount, DataError, InvalidRow, SourceRow
from paddlenlp_ext.utils.logging import get_logger

BUILTIN_NAMES = ("inflection",)
DEFAULT_CACHE = Path("~/.cache/paddlenlp_ext/data")

ReadRows = Callable[[], Iterable[SourceRow | InvalidRow]]


class DataOptions(Protocol):
    """The parts of `config.data` that are read here."""

    dataset_name_or_path: str | None
    task_name: str | None
    src_length: int
    max_length: int
    truncation: str
    bad_rows: str
    chat_template: str | None
    autoregressive: bool
    data_cache_dir: str | None


class TokenizedDataset:
    """Rows of one split as tokens, mapped from disk.

    Attributes:
        lengths: int64 [rows], the slots every row takes in a batch (its tokens but one).
        account: what became of every row that was read.
    """

    def __init__(
        self,
        store: TokenStore,
        account: DataAccount,
        files: Sequence[str],
        read: ReadRows,
        autoregressive: bool,
    ) -> None:
        self.account = account
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
        return EncodedRow(self._store.tokens[start:end], self._store.learned[start:end], int(index))

    def source(self, index: int) -> tuple[str, int]:
        """The file and line that row `index` was read from."""
        file, line, _ = self._store.places[index]
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
            file, line, column = self._store.places[index]
            place = row.place
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
    config: DataOptions,
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
    if config.bad_rows not in ("error", "drop"):
        raise ValueError(f"bad_rows is {config.bad_rows!r}; it can be error, drop")
    files, names, read = _open(config.dataset_name_or_path, split)
    if config.autoregressive:
        template = PlainTemplate(tokenizer)
    elif template is None:
        template = load_template(config.chat_template, tokenizer)
    limits = Limits(config.src_length, config.max_length, config.truncation)
    options = {**vars(limits), "bad_rows": config.bad_rows, "autoregressive": config.autoregressive}
    key = cache_key(
        files=files,
        tokenizer=fingerprint or tokenizer_fingerprint(tokenizer),
        template_text=template.identity,
        options=options,
    )
    folder = cache_dir(config) / f"{split}-{key[:32]}"

    def build() -> tuple[TokenStore, DataAccount]:
        return tokenize(read(), names, template, limits, config.autoregressive, config.bad_rows)

    store, account = load_or_build(folder, build)
    get_logger().info("%s", account.table(f"{split} rows of {config.dataset_name_or_path}"))
    for problem in account.examples:
        get_logger().warning("left out: %s", problem)
    return TokenizedDataset(store, account, names, read, config.autoregressive)


def cache_dir(config: DataOptions) -> Path:
    """Where tokenized data is kept, and what else would be made anew from the same files."""
    return Path(config.data_cache_dir or DEFAULT_CACHE).expanduser()


def tokenize(
    rows: Iterable[SourceRow | InvalidRow],
    files: Sequence[str],
    template: ChatTemplate,
    limits: Limits,
    autoregressive: bool = False,
    bad_rows: str = "error",
) -> tuple[TokenStore, DataAccount]:
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
    store = TokenStore.from_rows(kept, files)
    account = DataAccount(
        num_read=len(results),
        num_kept=sum(row.num_cut == 0 for row in kept),
        num_truncated=sum(row.num_cut > 0 for row in kept),
        num_tokens=len(store.tokens),
        num_target_tokens=int(store.learned.sum()),
        num_tokens_cut=sum(row.num_cut for row in kept),
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
