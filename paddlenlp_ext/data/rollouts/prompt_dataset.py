"""Prompts of a dataset for sampling, and stored groups of completions, with the interface of a tokenized dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections.grpo import PromptDataConfig
from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.data.prediction_prompts import Prompt, encode_truncated_prompt, parse_prompt
from paddlenlp_ext.data.readers.dataset_files import open_dataset, title_of
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.rollouts.rollout import Rollout, read_rollouts
from paddlenlp_ext.data.rows.errors import DataError, InvalidRowError
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.truncation import TOO_LONG
from paddlenlp_ext.utils.json_reader import Location

_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
_LISTS = ("messages", "conversations", "prompt")
"""Fields with a list of messages, in which case reward functions get messages."""


@dataclass(frozen=True)
class PromptRow:
    """Prompt of a row.

    Attributes:
        ids: tokens of the prompt.
        prompt: the prompt, and the last answer of the row, if there is one.
        value: the prompt as reward functions get it: a string, or a list of messages.
        columns: the other fields of the row. `reference` is the last answer of the row, if there is one.
        location: location of the row.
    """

    ids: list[int]
    prompt: Prompt
    value: str | list[dict[str, Any]]
    columns: Mapping[str, Any]
    location: Location

    def completion(self, text: str) -> str | list[dict[str, Any]]:
        """Return the text of a completion in the form of the prompt."""
        return text if isinstance(self.value, str) else [{"role": "assistant", "content": text}]


class PromptDataset:
    """Prompts in memory; an item is an `EncodedRow` without target tokens.

    Args:
        rows: the prompts.
        stats: counts of rows and tokens.
        tokenizer: a Hugging Face tokenizer.

    Attributes:
        lengths: int64 [rows], number of tokens of each prompt.
        sequence_lengths: int64 [rows], the same.
        stats: counts of rows and tokens.
    """

    prefixes = None

    def __init__(self, rows: Sequence[PromptRow], stats: DataStats, tokenizer: Any) -> None:
        self.rows, self.stats, self._tokenizer = list(rows), stats, tokenizer
        self.lengths = self.sequence_lengths = np.array([len(row.ids) for row in self.rows], np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EncodedRow:
        ids = np.array(self.rows[index].ids, np.int32)
        return EncodedRow(ids, np.zeros(len(ids), bool), int(index))

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index`."""
        location = self.rows[index].location
        return location.file or "", location.line or 0

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def head(self, count: int) -> list[EncodedRow]:
        """Return at most `count` rows from the start."""
        return [self[index] for index in range(min(count, len(self)))]


class StoredRollouts:
    """Groups of completions of a file; an item is an `EncodedRow` with the prompt.

    Args:
        rollouts: the groups.
        file: name of the file.
        lines: number of the line of each group in the file; None: the groups are all lines of the file.

    Attributes:
        rollouts: the groups; `row_index` is the index in this list.
        file: name of the file.
        lengths, sequence_lengths, stats: see `PromptDataset`.
    """

    prefixes = None

    def __init__(self, rollouts: Sequence[Rollout], file: str, lines: Sequence[int] | None = None) -> None:
        self.rollouts = [replace(rollout, row_index=index) for index, rollout in enumerate(rollouts)]
        self.file, self._lines = file, lines or range(1, len(rollouts) + 1)
        self.lengths = np.array([len(each.prompt_ids) for each in self.rollouts], np.int64)
        longest = [len(each.prompt_ids) + int(each.lengths.max()) - 1 for each in self.rollouts]
        self.sequence_lengths = np.array(longest, np.int64)
        count, tokens = len(self.rollouts), sum(int(each.lengths.sum()) for each in self.rollouts)
        self.stats = DataStats(
            num_read=count,
            num_untruncated=count,
            num_tokens=int(self.lengths.sum()) + tokens,
            num_target_tokens=tokens,
        )

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, index: int) -> EncodedRow:
        ids = np.array(self.rollouts[index].prompt_ids, np.int32)
        return EncodedRow(ids, np.zeros(len(ids), bool), int(index))

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of group `index`."""
        return self.file, self._lines[index]

    def select(self, indices: Sequence[int]) -> StoredRollouts:
        """Return the groups at `indices`."""
        return StoredRollouts(
            [self.rollouts[index] for index in indices], self.file, [self._lines[index] for index in indices]
        )

    def head(self, count: int) -> list[EncodedRow]:
        """Return at most `count` prompts from the start."""
        return [self[index] for index in range(min(count, len(self)))]


def load_policy_rows(config: PromptDataConfig, *, split: str, **inputs: Any) -> PromptDataset | StoredRollouts:
    """Load the prompts of a split, or for training the groups of `rollouts_path`; see `load_prompts`."""
    if split == "train" and config.rollouts_path is not None:
        return StoredRollouts(read_rollouts(config.rollouts_path), config.rollouts_path)
    return load_prompts(config, split, **inputs)


def load_prompts(
    config: PreferenceDataConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> PromptDataset:
    """Tokenize the prompts of a split.

    Args:
        config: `config.data` of a run; see `load_preference_dataset`.
        split: "train", "dev" or "test".
        tokenizer: a Hugging Face tokenizer.
        template: the chat template.
        fingerprint: unused, because prompts are not cached.
        rows: rows in memory to use instead of the files.

    Raises:
        ValueError: the files do not exist or have no valid rows.
        DataError: rows are invalid and `bad_rows` is "error".
    """
    if (split == "train" or config.dev_ratio) and config.train_dataset_path is not None:
        config = replace(config, dataset_name_or_path=config.train_dataset_path)
    readers = open_dataset(config, split, rows=rows)
    found, problems, stats = [], [], DataStats()
    for row in (row for reader in readers for row in reader.rows()):
        stats.num_read += 1
        if isinstance(row, InvalidRow):
            problems.append(row)
            continue
        try:
            prompt, was_truncated = _encode(row, template, config)
        except InvalidRowError as error:
            problems.append(error.in_row(row))
            continue
        found.append(prompt)
        stats.num_truncated += was_truncated
    errors = [each for each in problems if each.fatal or (config.bad_rows == "error" and not each.by_policy)]
    if errors:
        raise DataError(errors)
    stats.drop(problems)
    stats.num_untruncated = len(found) - stats.num_truncated
    stats.num_tokens = sum(len(row.ids) for row in found)
    stats.log(f"{split} prompts of {title_of(config, readers)}")
    if not found:
        raise ValueError(f"the {split} split has no valid rows; add rows with prompts")
    return PromptDataset(found, stats, tokenizer)


def _encode(row: SourceRow, template: ChatTemplate, config: PreferenceDataConfig) -> tuple[PromptRow, bool]:
    prompt = parse_prompt(row.value)
    try:
        ids, was_truncated = encode_truncated_prompt(template, prompt, config.src_length)
    except ValueError as error:
        raise InvalidRowError(TOO_LONG, str(error)) from error
    if was_truncated and config.truncation in ("drop", "error"):
        message = f"the prompt has more than src_length {config.src_length} tokens; raise src_length"
        raise InvalidRowError(TOO_LONG, message, by_policy=config.truncation == "drop")
    return PromptRow(ids, prompt, _value(row.value, prompt), _columns(row.value, prompt), row.location), was_truncated


def _value(row: Mapping[str, Any], prompt: Prompt) -> str | list[dict[str, Any]]:
    if not any(isinstance(row.get(name), list) for name in _LISTS):
        return prompt.text
    return [{"role": message.role, "content": message.content} for message in prompt.conversation.messages]


def _columns(row: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    reference = {} if prompt.reference is None else {"reference": prompt.reference}
    return {**reference, **{name: value for name, value in row.items() if name not in _RESERVED}}
