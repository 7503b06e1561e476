"""Tokenize a split of a dataset once, and map its tokens from a cache.

The name of a cache directory is a hash of everything that determines the tokens, and of nothing else. The directory
holds the arrays of `TokenArrays`, one file each, and the statistics of the split (account.json).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections import DataConfig
from paddlenlp_ext.data.formats import parse_row
from paddlenlp_ext.data.inflection import lexicon_path, read_inflection
from paddlenlp_ext.data.row_fields import unknown_fields
from paddlenlp_ext.data.sources import find_files, read_rows
from paddlenlp_ext.data.templates import ChatTemplate, TemplateOptions, load_template
from paddlenlp_ext.data.templates.base import PlainTemplate
from paddlenlp_ext.data.tokenize import LengthLimits, TokenizedRow, encode_rows
from paddlenlp_ext.data.types import MAX_LISTED, DataError, DataStats, EncodedRow, InvalidRow, SourceRow
from paddlenlp_ext.utils.files import atomic_folder, file_lock
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.logging import get_logger

TOKENIZATION_VERSION = 4
"""Part of the cache key: raise it with every change that produces other tokens from the same rows.

`tests/data/test_tokenization_version.py` compares the tokens of fixed rows with a digest recorded for this version.
"""
_PLAIN_KEYS = frozenset(
    {b"src", b"tgt", b"messages", b"role", b"content", b"conversations", b"from", b"value", b"system", b"text"}
)
"""Keys of rows that versions 1 to 4 read alike; files with only these keys keep their caches of version 1."""
_V1_FILE = Path(__file__).parent / "tokenization_v1.json"
"""Values that represent tokenization version 1 in a key: the version of the package, and hashes of its source files.

Earlier releases hashed the source files themselves. Their last hashes are stored here, so that their caches stay valid.
"""
STATS_FILE = "account.json"
_ARRAY_FILES = {"loss_mask": "learned", "locations": "places"}
"""File names of the arrays that are not named after their attribute."""
BUILTIN_NAMES = ("inflection",)
DEFAULT_CACHE = Path("~/.cache/paddlenlp_ext/data")

ReadRows = Callable[[], Iterable[SourceRow | InvalidRow]]


class TokenizedDataset:
    """Tokenized rows of one split, mapped from disk; an item is an `EncodedRow`.

    Attributes:
        lengths: int64 [rows], number of positions of each row in a batch (its number of tokens minus one).
        stats: numbers of rows and tokens.
    """

    def __init__(
        self,
        arrays: TokenArrays,
        stats: DataStats,
        files: Sequence[str],
        read: ReadRows,
        template: ChatTemplate,
        autoregressive: bool,
    ) -> None:
        self.stats = stats
        self.lengths = np.diff(arrays.offsets) - 1
        self._arrays = arrays
        self._files = list(files)
        self._read = read
        self._template = template
        self._autoregressive = autoregressive

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedRow:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = self._arrays.offsets[index : index + 2]
        return EncodedRow(self._arrays.tokens[start:end], self._arrays.loss_mask[start:end], int(index))

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index`."""
        file, line, _ = self._arrays.locations[index]
        return self._files[file], int(line)

    def prompts(self) -> Iterator[tuple[list[int], str, str]]:
        """Yield (prompt ids, reference answer, question) of the last target of every row, to evaluate by generation.

        The ids are the tokens of the row before its last target answer. The texts are read from the data files again.

        Raises:
            ValueError: the dataset is plain text, without answers, or a row has an empty prompt.
        """
        if self._autoregressive:
            raise ValueError(
                "autoregressive: plain text has no prompts to generate from; set eval_with_do_generation: false"
            )
        index = 0
        for row in self._read():
            previous = -1  # the examples of a row are in the order of their last answers
            while index < len(self) and self._is_at(index, row.location) and self._arrays.answers[index, 1] > previous:
                start, previous = self._arrays.answers[index]
                if start == 0:
                    raise ValueError(f"{row.location}: the prompt is empty; add a question to generate from")
                assert isinstance(row, SourceRow), f"{row.location}: a stored row is invalid"
                yield (self[index].tokens[:start].tolist(), *self._answer(row, previous))
                index += 1
        assert index == len(self), f"{len(self) - index} rows are no longer in {self._files}"

    def _is_at(self, index: int, location: Location) -> bool:
        """Return whether an example is of the row at a location."""
        file, line, column = self._arrays.locations[index]
        return (location.file, location.line, location.column) == (self._files[file], line, column)

    def _answer(self, row: SourceRow, number: int) -> tuple[str, str]:
        """Return an answer of a row, as the model is to write it, and the question before it."""
        conversation = parse_row(row.value)
        position = [index for index, message in enumerate(conversation.messages) if message.is_answer][number]
        answer, text = conversation.messages[position], conversation.messages[position].content
        if answer.tool_calls or answer.reasoning is not None:
            examples = self._template.render(conversation)
            (turn,) = [t for e in examples for t in e.turns if t.number == number and t.is_target]
            text = self._template.answer_text(turn)
        return text, conversation.question_before(position)


def load_dataset(
    config: DataConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
) -> TokenizedDataset:
    """Tokenize a split, or map its tokens from the cache.

    Args:
        config: `config.data` of a run.
        split: "train" or "dev".
        tokenizer: a Hugging Face tokenizer.
        template: the result of `load_template(config.chat_template, tokenizer)`, if already computed.
        fingerprint: the result of `tokenizer_fingerprint(tokenizer)`, if already computed.

    Raises:
        ValueError: the dataset does not exist or has no valid row, or the cache cannot be written.
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
    """
    if config.dataset_name_or_path is None:
        known = ", ".join(BUILTIN_NAMES)
        raise ValueError(f"dataset_name_or_path: not set; use a directory or a built-in dataset ({known})")
    if config.task_name:
        raise ValueError(f"task_name: {config.task_name!r} has no effect, as no built-in dataset has tasks; remove it")
    files, names, read = _open_split(config.dataset_name_or_path, split)
    if config.autoregressive:
        template = PlainTemplate(tokenizer)
    elif template is None:
        template = load_template(config.chat_template, tokenizer, template_options(config))
    limits = LengthLimits(config.src_length, config.max_length, config.truncation)
    options = {**vars(limits), "bad_rows": config.bad_rows, "autoregressive": config.autoregressive}
    key = cache_key(
        files=files,
        tokenizer=fingerprint or tokenizer_fingerprint(tokenizer),
        template_text=template.identity,
        options=options,
        reads_more=template.writes_messages and config.bad_rows == "drop",
    )
    folder = cache_dir(config) / f"{split}-{key[:32]}"

    def build() -> tuple[TokenArrays, DataStats]:
        return tokenize(read(), names, template, limits, config.autoregressive, config.bad_rows)

    arrays, stats = load_or_build(folder, build)
    get_logger().info("%s", stats.table(f"{split} rows of {config.dataset_name_or_path}"))
    for problem in stats.examples:
        get_logger().warning("dropped: %s", problem)
    for line in stats.describe_unknown_fields():
        get_logger().info("%s", line)
    return TokenizedDataset(arrays, stats, names, read, template, config.autoregressive)


def template_options(config: DataConfig) -> TemplateOptions:
    """Return the options of the chat template that a configuration sets."""
    return TemplateOptions(config.chat_template_kwargs or {}, config.learn_empty_think, config.mask_reasoning)


def cache_dir(config: DataConfig) -> Path:
    """Return the directory that holds the cached tokens of all datasets."""
    return Path(config.data_cache_dir or DEFAULT_CACHE).expanduser()


def tokenize(
    rows: Iterable[SourceRow | InvalidRow],
    files: Sequence[str],
    template: ChatTemplate,
    limits: LengthLimits,
    autoregressive: bool = False,
    bad_rows: str = "error",
) -> tuple[TokenArrays, DataStats]:
    """Tokenize rows, and count the untruncated, truncated and dropped ones.

    Args:
        rows: rows of a split, as read.
        files: names of the files that the rows were read from; locations store indices into this list.
        template: chat template that renders conversations.
        limits: `src_length`, `max_length` and `truncation`.
        autoregressive: rows are plain text; all of their tokens count in the loss.
        bad_rows: "error" or "drop".

    Raises:
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
        ValueError: no row is valid.
    """
    unknown: dict[str, Counter[str]] = {}
    results = list(encode_rows(_count_unknown_fields(rows, autoregressive, unknown), template, limits, autoregressive))
    valid = [row for row in results if not isinstance(row, InvalidRow)]
    dropped = [row for row in results if isinstance(row, InvalidRow)]
    invalid = [row for row in dropped if not row.by_policy]
    if invalid and bad_rows == "error":
        raise DataError(invalid)
    if fatal := [row for row in invalid if row.fatal]:
        raise DataError(fatal)
    arrays = TokenArrays.from_rows(valid, files)
    starts = [index for index, example in enumerate(valid) if example.part == 0]
    rows_read = [valid[start:end] for start, end in pairwise([*starts, len(valid)])]
    unfolded = [len(examples) for examples in rows_read if len(examples) > 1]
    num_truncated = sum(any(example.num_truncated_tokens for example in examples) for examples in rows_read)
    stats = DataStats(
        num_read=len(rows_read) + len(dropped),
        num_untruncated=len(rows_read) - num_truncated,
        num_truncated=num_truncated,
        num_tokens=len(arrays.tokens),
        num_target_tokens=int(arrays.loss_mask.sum()),
        num_truncated_tokens=sum(row.num_truncated_tokens for row in valid),
        num_unfolded=len(unfolded),
        num_unfolded_examples=sum(unfolded),
        num_thoughts=sum(row.num_thoughts for row in valid),
        num_tool_calls=sum(row.num_tool_calls for row in valid),
        unknown_fields={file: dict(counts) for file, counts in unknown.items()},
    )
    stats.drop(dropped, MAX_LISTED)
    stats.check()
    if not valid:
        listed = "".join(f"\n  {problem}" for problem in stats.examples)
        raise ValueError(f"{', '.join(files)}: no valid row\n{stats.table()}{listed}")
    return arrays, stats


def _count_unknown_fields(
    rows: Iterable[SourceRow | InvalidRow], autoregressive: bool, unknown: dict[str, Counter[str]]
) -> Iterator[SourceRow | InvalidRow]:
    """Yield the rows, and count their unknown fields in `unknown`: file -> field -> number of rows."""
    for row in rows:
        if isinstance(row, SourceRow):
            for name in unknown_fields(row.value, autoregressive):
                unknown.setdefault(str(row.location.file), Counter())[name] += 1
        yield row


def _open_split(name_or_path: str, split: str) -> tuple[list[Path], list[str], ReadRows]:
    """Return the files of a split, their names in locations, and a function that reads the rows."""
    if name_or_path == "inflection":
        path = lexicon_path()
        return [path], [path.name], lambda: read_inflection(split)
    files = find_files(name_or_path, split, BUILTIN_NAMES)
    return files, [str(path) for path in files], lambda: (row for path in files for row in read_rows(path))


@dataclass(frozen=True)
class TokenArrays:
    """Tokens of all rows of a split, concatenated.

    Attributes:
        tokens: int32 [tokens].
        loss_mask: bool [tokens], true for target tokens.
        offsets: int64 [rows + 1]; row i holds the tokens from offsets[i] to offsets[i + 1].
        locations: int64 [rows, 3]: index of the file, line, column.
        answers: int64 [rows, 2]: index of the last target answer's first token within the row, and index of its turn.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    locations: np.ndarray
    answers: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[TokenizedRow], files: Sequence[str]) -> TokenArrays:
        """Concatenate rows; a location stores the index of its file in `files`."""
        file_index: dict[str | None, int] = {file: index for index, file in enumerate(files)}
        lengths = [len(row.tokens) for row in rows]
        locations = [(file_index[row.location.file], row.location.line, row.location.column) for row in rows]
        return cls(
            tokens=np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0, np.int32),
            loss_mask=np.concatenate([row.loss_mask for row in rows]) if rows else np.zeros(0, bool),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            locations=np.array(locations, dtype=np.int64).reshape(len(rows), 3),
            answers=np.array([(row.answer_start, row.last_turn) for row in rows], dtype=np.int64).reshape(len(rows), 2),
        )

    def save(self, folder: Path) -> None:
        """Write each array to a file in `folder`."""
        for name, array in vars(self).items():
            np.save(folder / _file_name(name), array, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> TokenArrays:
        """Map the arrays that `save` wrote to `folder`.

        Raises:
            ValueError: a file is missing or damaged.
        """
        try:
            names = list(cls.__dataclass_fields__)
            mapped = [np.load(folder / _file_name(name), mmap_mode="r", allow_pickle=False) for name in names]
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{folder}: the cached tokens are damaged ({error}); delete this directory") from error
        arrays = cls(*map(np.asarray, mapped))  # plain arrays: slicing a np.memmap takes five times as long
        if len(arrays.offsets) < 1 or arrays.offsets[-1] != len(arrays.tokens):
            raise ValueError(f"{folder}: the cached tokens are damaged (lengths disagree); delete this directory")
        return arrays


def _file_name(name: str) -> str:
    return f"{_ARRAY_FILES.get(name, name)}.npy"


def load_or_build(folder: Path, build: Callable[[], tuple[TokenArrays, DataStats]]) -> tuple[TokenArrays, DataStats]:
    """Load the arrays and statistics in `folder`, after building them if the directory does not exist.

    One of several processes builds while the others wait. If `build` raises an error, no files remain.

    Raises:
        ValueError: the directory is damaged or cannot be written.
    """
    with file_lock(folder, "set data_cache_dir"):
        if not folder.is_dir():
            arrays, stats = build()
            with atomic_folder(folder) as draft:
                arrays.save(draft)
                (draft / STATS_FILE).write_text(json.dumps(stats.to_json(), indent=1), encoding="utf-8")
            get_logger().info("tokens cached in %s", folder)
        else:
            get_logger().info("cached tokens found in %s", folder)
    stats = DataStats.from_json(json.loads((folder / STATS_FILE).read_text(encoding="utf-8")))
    return TokenArrays.load(folder), stats


def cache_key(
    *,
    files: Sequence[Path],
    tokenizer: str,
    template_text: str,
    options: Mapping[str, Any],
    reads_more: bool = False,
) -> str:
    """Return a hash of everything that determines the tokens of a split.

    Args:
        files: data files in reading order; their names and contents count.
        tokenizer: the result of `tokenizer_fingerprint`.
        template_text: `identity` of the chat template.
        options: configuration values that change the tokens.
        reads_more: earlier versions dropped rows that the template now writes, such as two questions in a row.
    """
    contents = [path.read_bytes() for path in files]
    parts = {
        "files": [(str(path), _hash(content)) for path, content in zip(files, contents, strict=True)],
        "tokenizer": tokenizer,
        "template": template_text,
        "options": dict(options),
        **tokenization_facts(not reads_more and all(map(_has_plain_keys, contents))),
    }
    return _hash(json.dumps(parts, sort_keys=True).encode())


def tokenization_facts(has_plain_keys: bool) -> dict[str, Any]:
    """Return the part of a key that identifies the code: the tokenization version and the versions of libraries.

    Args:
        has_plain_keys: whether the rows have only keys that tokenization version 1 read alike.
    """
    libraries = [version(name) for name in ("tokenizers", "transformers", "jinja2")]
    if has_plain_keys and TOKENIZATION_VERSION == 4:
        first = json.loads(_V1_FILE.read_text(encoding="utf-8"))
        return {"code": first["code"], "versions": [first["package"], *libraries]}
    return {"code": TOKENIZATION_VERSION, "versions": libraries}


def _has_plain_keys(content: bytes) -> bool:
    """Return whether JSON rows have only keys of `_PLAIN_KEYS`; a quoted key in a text may make the result False."""
    return all(match[1] in _PLAIN_KEYS for match in re.finditer(rb'"([^"]*)"\s*:', content))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a hash of everything that determines how a tokenizer encodes text; its path and padding do not count."""
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    parts: dict[str, Any] = {"class": type(tokenizer).__name__, "special": special}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        parts["backend"] = {name: value for name, value in state.items() if name not in ("padding", "truncation")}
    else:
        parts["vocabulary"] = tokenizer.get_vocab()
        parts["added"] = {str(index): str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        # The merge scores of a SentencePiece model are only in its file.
        model_file = getattr(tokenizer, "vocab_file", None)
        parts["model"] = _hash(Path(model_file).read_bytes()) if model_file else None
    return _hash(json.dumps(parts, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
