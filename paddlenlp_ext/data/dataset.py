"""Tokenize a split of a dataset once, and memory-map its tokens from the cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.find_prefixes import find_prefixes
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.readers.dataset_files import open_dataset, title_of
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.rows.row_formats import parse_row
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.data.shared_prefixes import SharedPrefixes
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import choose_template
from paddlenlp_ext.data.tokenization.cache_key import tokenizer_fingerprint
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.token_cache import load_or_tokenize
from paddlenlp_ext.utils.json_reader import Location


class TokenizedDataset:
    """Tokenized rows of one split, memory-mapped from disk; an item is an `EncodedRow`.

    Attributes:
        lengths: int64 [rows], number of positions of each row in a batch: its token count minus one.
        sequence_lengths: int64 [rows], number of positions of the longest sequence of each row.
        stats: counts of rows and tokens.
        prefixes: prefixes that rows share; None without `share_prefix`.
    """

    prefixes: SharedPrefixes | None = None

    def __init__(
        self,
        arrays: TokenArrays,
        stats: DataStats,
        readers: Sequence[Reader],
        template: ChatTemplate,
        autoregressive: bool,
    ) -> None:
        self.stats = stats
        self.lengths = self.sequence_lengths = arrays.lengths
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

    @property
    def token_arrays(self) -> list[TokenArrays]:
        """Tokens of all rows, one item per dataset."""
        return [self._arrays]

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index`."""
        file, line, _ = self._arrays.locations[index]
        return self._readers[file].name, int(line)

    def head(self, count: int) -> list[EncodedRow]:
        """Return at most `count` rows from the start."""
        return [self[index] for index in range(min(count, len(self)))]

    def prompts(self) -> Iterator[tuple[list[int], str, str]]:
        """Yield (prompt ids, reference answer, question) for the last target answer of every row.

        The prompt ids are the tokens before the answer. Answers and questions are read again from the data files.

        Raises:
            ValueError: the dataset is plain text, or a row has an empty prompt.
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
                    raise ValueError(f"{row.location}: the prompt is empty; add a question before the answer")
                assert isinstance(row, SourceRow), f"{row.location}: a stored row is invalid"
                yield (self[index].tokens[:start].tolist(), *self._answer(row, number))
                index += 1
        assert index == len(self), f"{len(self) - index} rows are no longer in the data files"

    def _is_at(self, index: int, location: Location) -> bool:
        """Return whether example `index` comes from the row at a location."""
        file, line, column = self._arrays.locations[index]
        return (location.file, location.line, location.column) == (self._readers[file].name, line, column)

    def _answer(self, row: SourceRow, number: int) -> tuple[str, str]:
        """Return answer `number` of a row, as the model should generate it, and the question before the answer."""
        conversation = parse_row(row.value)
        position = [index for index, message in enumerate(conversation.messages) if message.is_answer][number]
        answer, text = conversation.messages[position], conversation.messages[position].content
        if answer.tool_calls or answer.reasoning is not None:
            examples = self._template.render(conversation)
            (turn,) = [t for e in examples for t in e.turns if t.number == number and t.is_target]
            text = self._template.answer_text(turn)
        return text, conversation.question_before(position)


def load_dataset(
    dataset_name_or_path: DataConfig | str | os.PathLike[str] | Rows,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    **keys: Any,
) -> TokenizedDataset:
    """Tokenize a split of a dataset, or memory-map its tokens from the cache.

    Args:
        dataset_name_or_path: a directory with `train.json` and `dev.json`, a data file, the name of a built-in
            dataset, a hub id, rows as a list of dicts or a `datasets.Dataset`, or `config.data` of a run.
        split: "train", "dev" or "test". For a single file or rows in memory, the split is only a label.
        tokenizer: a Hugging Face tokenizer.
        template: the chat template, if already loaded; None loads the template that the data keys select.
        fingerprint: the result of `tokenizer_fingerprint(tokenizer)`, if already computed.
        keys: data keys of a run, such as `max_length` or `chat_template`; not allowed with `config.data`.

    Raises:
        ValueError: the dataset does not exist or has no valid rows, or the cache directory is not writable.
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.

    Examples:
        >>> from paddlenlp_ext import AutoTokenizer, load_dataset
        >>> tokenizer = AutoTokenizer.from_pretrained("smollm2-135m-instruct")
        >>> dataset = load_dataset([{"src": "2 + 2?", "tgt": "4"}], "train", tokenizer, chat_template="none")
        >>> len(dataset), tokenizer.decode(dataset[0].tokens)
        (1, '2 + 2?4<|im_end|>')
    """
    if isinstance(dataset_name_or_path, DataConfig):
        assert not keys, "data keys must be set in the configuration"
        return load_split(dataset_name_or_path, split, tokenizer, template, fingerprint)
    if isinstance(dataset_name_or_path, str | os.PathLike):
        path = os.fspath(dataset_name_or_path)
        keys.setdefault("eval_dataset_path", (path,))
        return load_split(DataConfig(dataset_name_or_path=path, **keys), split, tokenizer, template, fingerprint)
    return load_split(DataConfig(**keys), split, tokenizer, template, fingerprint, rows=dataset_name_or_path)


def load_split(
    config: DataConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> TokenizedDataset:
    """Tokenize a split of the configured datasets, or of rows in memory; see `load_dataset`.

    With `share_prefix`, also find the prefixes that training rows share.
    """
    readers = open_dataset(config, split, rows=rows)
    template = choose_template(config, tokenizer, template)
    encoder = RowEncoder.from_config(config, template, readers)
    _, arrays, stats = load_or_tokenize(
        config,
        split,
        readers,
        encoder,
        fingerprint or tokenizer_fingerprint(tokenizer),
        title=title_of(config, readers),
        reads_more=template.writes_messages and config.bad_rows == "drop",
    )
    dataset = TokenizedDataset(arrays, stats, readers, template, config.autoregressive)
    if config.share_prefix and split == "train":
        dataset.prefixes = find_prefixes([arrays], config.max_length)
    return dataset
