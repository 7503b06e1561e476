"""Tokenize a split of a dataset once, and map its tokens from a cache.

The name of a cache directory is a hash of everything that determines the tokens, and of nothing else (`store` has its
files). Data files are read in pieces and tokenized by several processes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections import DataConfig
from paddlenlp_ext.data.encode import BlockEncoder, RowEncoder, num_workers
from paddlenlp_ext.data.formats import parse_row
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.sources import BUILTIN_NAMES, dataset_names, open_splits
from paddlenlp_ext.data.store import TokenArrays, TokenWriter, load_or_build
from paddlenlp_ext.data.templates import ChatTemplate, TemplateOptions, load_template
from paddlenlp_ext.data.templates.base import PlainTemplate
from paddlenlp_ext.data.tokenize import LengthLimits
from paddlenlp_ext.data.types import DataError, DataStats, EncodedRow, InvalidRow, SourceRow
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
DEFAULT_CACHE = Path("~/.cache/paddlenlp_ext/data")


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
        readers: Sequence[Reader],
        template: ChatTemplate,
        autoregressive: bool,
    ) -> None:
        self.stats = stats
        self.lengths = arrays.lengths
        self._arrays = arrays
        self._readers = list(readers)
        self._template = template
        self._autoregressive = autoregressive

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedRow:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._arrays.row(index, int(index))

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index`."""
        file, line, _ = self._arrays.locations[index]
        return self._readers[file].name, int(line)

    def head(self, count: int) -> list[EncodedRow]:
        """Return the first rows, at most `count`."""
        return [self[index] for index in range(min(count, len(self)))]

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
        for row in itertools.chain.from_iterable(reader.rows() for reader in self._readers):
            while index < len(self) and self._is_at(index, row.location):
                start, number = self._arrays.answers[index]
                if start == 0:
                    raise ValueError(f"{row.location}: the prompt is empty; add a question to generate from")
                assert isinstance(row, SourceRow), f"{row.location}: a stored row is invalid"
                yield (self[index].tokens[:start].tolist(), *self._answer(row, number))
                index += 1
        assert index == len(self), f"{len(self) - index} rows are no longer in the data files"

    def _is_at(self, index: int, location: Location) -> bool:
        """Return whether an example is of the row at a location."""
        file, line, column = self._arrays.locations[index]
        return (location.file, location.line, location.column) == (self._readers[file].name, line, column)

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
    names = dataset_names(config.dataset_name_or_path)
    readers = open_splits(names, split, config.task_name)
    template = choose_template(config, tokenizer, template)
    encoder = row_encoder(config, template, readers)
    limits = encoder.limits
    key = cache_key(
        readers=readers,
        tokenizer=fingerprint or tokenizer_fingerprint(tokenizer),
        template_text=template.identity,
        # Earlier versions truncated plain text: "split" in the key tells their caches apart.
        options={**vars(limits), "bad_rows": config.bad_rows, "autoregressive": config.autoregressive and "split"},
        reads_more=template.writes_messages and config.bad_rows == "drop",
    )

    def build(folder: Path) -> DataStats:
        return tokenize(readers, encoder, folder, config.bad_rows, config.dataset_num_proc)

    arrays, stats = load_or_build(cache_dir(config) / f"{split}-{key[:32]}", build)
    log_stats(stats, f"{split} rows of {', '.join(names)}")
    return TokenizedDataset(arrays, stats, readers, template, config.autoregressive)


def row_encoder(config: DataConfig, template: ChatTemplate, readers: Sequence[Reader]) -> RowEncoder:
    """Return the encoder of the rows of some readers."""
    limits = LengthLimits(config.src_length, config.max_length, config.truncation)
    return RowEncoder(template, limits, config.autoregressive, tuple(reader.name for reader in readers))


def choose_template(config: DataConfig, tokenizer: Any, template: ChatTemplate | None = None) -> ChatTemplate:
    """Return the template that renders the rows: none for plain text, else the given one or that of the config."""
    if config.autoregressive:
        return PlainTemplate(tokenizer)
    return template or load_template(config.chat_template, tokenizer, template_options(config))


def template_options(config: DataConfig) -> TemplateOptions:
    """Return the options of the chat template that a configuration sets."""
    return TemplateOptions(config.chat_template_kwargs or {}, config.learn_empty_think, config.mask_reasoning)


def log_stats(stats: DataStats, title: str) -> None:
    """Log the statistics of a split, the first dropped rows, and the fields without effect."""
    get_logger().info("%s", stats.table(title))
    for problem in stats.examples:
        get_logger().warning("dropped: %s", problem)
    for line in stats.describe_unknown_fields():
        get_logger().info("%s", line)


def cache_dir(config: DataConfig) -> Path:
    """Return the directory that holds the cached tokens of all datasets."""
    return Path(config.data_cache_dir or DEFAULT_CACHE).expanduser()


def tokenize(
    readers: Sequence[Reader],
    encoder: RowEncoder,
    folder: Path,
    bad_rows: str = "error",
    num_processes: int | None = None,
) -> DataStats:
    """Tokenize the rows of data files into the arrays of `folder`, and count them.

    Args:
        readers: readers of the files, in reading order.
        encoder: encoder of the rows.
        folder: directory for the arrays of `TokenArrays`.
        bad_rows: "error" or "drop".
        num_processes: number of processes; None: the available processors.

    Raises:
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
        ValueError: no row is valid.
    """
    stats = DataStats()
    invalid: list[InvalidRow] = []
    num_processes = num_workers(num_processes, sum(reader.size for reader in readers))
    blocks = (block for reader in readers for block in reader.blocks())
    with BlockEncoder(encoder, num_processes) as workers, TokenWriter(folder) as writer:
        for encoded in workers.encode(blocks):
            writer.append(encoded.arrays)
            stats.add(encoded.stats)
            invalid += [row for row in encoded.invalid if row.fatal or bad_rows == "error"]
    if invalid:
        raise DataError(invalid)
    stats.check()
    if not stats.num_untruncated + stats.num_truncated:
        listed = "".join(f"\n  {problem}" for problem in stats.examples)
        raise ValueError(f"{', '.join(encoder.files)}: no valid row\n{stats.table()}{listed}")
    return stats


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
        readers: readers of the data files in reading order; their names and contents count.
        tokenizer: the result of `tokenizer_fingerprint`.
        template_text: `identity` of the chat template.
        options: configuration values that change the tokens.
        reads_more: earlier versions dropped rows that the template now writes, such as two questions in a row.
    """
    keys = [_PlainKeys() for _ in readers]
    parts: dict[str, Any] = {
        "files": [reader.fingerprint(seen.observe) for reader, seen in zip(readers, keys, strict=True)],
        "tokenizer": tokenizer,
        "template": template_text,
        "options": dict(options),
    }
    # The fingerprints above have read the files.
    is_plain = all(reader.is_json_text and seen.are_plain for reader, seen in zip(readers, keys, strict=True))
    parts |= tokenization_facts(is_plain and not reads_more)
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


_THOUGHT_END = re.compile(rb"<\\?/think>")


class _PlainKeys:
    """Scan JSON text, piece by piece, for keys that are not in `_PLAIN_KEYS`, and for thoughts in tags.

    A quoted key in a text may count as a key as well. Empty thoughts in tags are no targets since version 4.

    Attributes:
        are_plain: whether neither was found so far.
    """

    def __init__(self) -> None:
        self.are_plain = True
        self._rest = b""

    def observe(self, content: bytes) -> None:
        """Scan the next piece of the text."""
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
        # A key may begin at one of the last two quotes and end in the next piece.
        last = text.rfind(b'"', end)
        before = text.rfind(b'"', end, max(last, end))
        begins = [quote for quote in (before, last) if quote >= 0]
        self._rest = text[begins[0] :] if begins else b""


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
