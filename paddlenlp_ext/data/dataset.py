"""Tokenize a split of a dataset once, and map its tokens from the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.readers.dataset_files import BUILTIN_NAMES, dataset_names, open_splits
from paddlenlp_ext.data.rows.errors import DataError
from paddlenlp_ext.data.rows.formats import parse_row
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate, TemplateOptions
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.templates.plain import PlainTemplate
from paddlenlp_ext.data.tokenization.cache_key import cache_key, tokenizer_fingerprint
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.token_arrays import TokenArrays, TokenWriter
from paddlenlp_ext.data.tokenization.token_cache import load_or_build
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.data.tokenization.workers import BlockEncoder, num_workers
from paddlenlp_ext.utils.json_reader import Location
from paddlenlp_ext.utils.logging import get_logger

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
