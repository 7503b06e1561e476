"""Tokenize a split of preference data once, and memory-map its tokens from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.preference.tokenize_reward_pairs import RewardEncoder
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.readers.dataset_files import open_dataset
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import load_configured_template
from paddlenlp_ext.data.tokenization.cache_key import tokenizer_fingerprint
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.token_cache import load_or_tokenize
from paddlenlp_ext.data.tokenization.truncation import LengthLimits


class PairDataset(TokenizedDataset):
    """Tokenized rows of preference data, memory-mapped from disk; an item is a `TokenizedPair`.

    Args:
        arrays, stats, readers, template: see `TokenizedDataset`.
        encoder: encoder of the rows.
        cache_folder: folder of the cached tokens; its name contains the cache key.

    Attributes:
        lengths: int64 [rows], number of positions of each row in a batch.
        sequence_lengths: int64 [rows], number of positions of the prompt with the longer answer.
        num_answers: int64 [rows], 2 for a pair and 1 for a rated answer.
    """

    def __init__(
        self,
        arrays: TokenArrays,
        stats: DataStats,
        readers: Sequence[Reader],
        template: ChatTemplate,
        encoder: PreferenceEncoder,
        cache_folder: Path,
    ) -> None:
        super().__init__(arrays, stats, readers, template, autoregressive=False)
        self.cache_folder = cache_folder
        self._encoder = encoder
        num_tokens = self.lengths + 1
        prompt_lengths = arrays.answers[:, 0]
        self.num_answers = 1 + (arrays.answers[:, 1] < num_tokens)
        ends = arrays.answers[:, 1]
        self.sequence_lengths = prompt_lengths + np.maximum(ends - prompt_lengths, num_tokens - ends) - 1
        copies = 1 if encoder.share_prompt else self.num_answers
        self.lengths = num_tokens - prompt_lengths + copies * (prompt_lengths - 1)
        if encoder.scores_last_tokens:
            self.lengths = self.lengths + self.num_answers

    def __getitem__(self, index: int) -> TokenizedPair:
        row, values = super().__getitem__(index), self._arrays.values
        first, second, is_desirable = self._arrays.answers[index].tolist()
        is_pair = second < len(row.tokens)
        return TokenizedPair(
            row.tokens,
            row.loss_mask,
            row.row_index,
            answer_starts=(first, second) if is_pair else (first,),
            is_desirable=(True, False) if is_pair else (bool(is_desirable),),
            share_prompt=self._encoder.share_prompt,
            scores_last_tokens=self._encoder.scores_last_tokens,
            margin=0.0 if values is None else float(values[index, 0]),
        )

    def prompts(self) -> Iterator[tuple[list[int], str, str]]:
        """Raise a ValueError, because answers to preference data are not generated."""
        raise ValueError("answers to preference data are not generated; set eval_with_do_generation: false")


def load_preference_dataset(
    config: PreferenceDataConfig,
    preference: PreferenceConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> PairDataset:
    """Tokenize a split of preference data, or memory-map its tokens from the cache.

    Args:
        config: `config.data` of a run. If `train_dataset_path` is set, training rows and the eval rows that `dev_ratio`
            holds out are read from this path. All other rows are read from `dataset_name_or_path`.
        preference: `config.preference` of the run.
        split: "train" or "dev".
        tokenizer: a Hugging Face tokenizer.
        template: the chat template, if already loaded; None loads the template that `config` selects.
        fingerprint: the result of `tokenizer_fingerprint(tokenizer)`, if already computed.
        rows: rows in memory to use instead of the files.

    Raises:
        ValueError: the files do not exist or have no valid rows, the cache directory is not writable, or a row has one
            answer although the loss compares two answers.
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
    """
    shared = (tokenizer, template, fingerprint, rows)
    dataset = load_pairs(PreferenceEncoder, config, preference.share_prompt, split, *shared)
    if preference.loss_type != "kto" and (dataset.num_answers == 1).any():
        file, line_number = dataset.source(int((dataset.num_answers == 1).argmax()))
        raise ValueError(
            f"{file}:{line_number}: the row has one answer, but loss_type: {preference.loss_type} compares two "
            "answers; set loss_type: kto, or add a second answer"
        )
    return dataset


def load_reward_dataset(
    config: PreferenceDataConfig,
    reward: RewardConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> PairDataset:
    """Tokenize a split for a reward model, or memory-map its tokens; see `load_preference_dataset`."""
    return load_pairs(RewardEncoder, config, reward.share_prompt, split, tokenizer, template, fingerprint, rows)


def load_pairs(
    encoder_class: type[PreferenceEncoder],
    config: PreferenceDataConfig,
    share_prompt: bool,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> PairDataset:
    """Tokenize a split with an encoder of `encoder_class`, or memory-map its tokens from the cache.

    See `load_preference_dataset` for the other arguments and the errors; rows with one answer are accepted.
    """
    template = template or load_configured_template(config, tokenizer)
    readers, encoder = open_pairs(encoder_class, config, share_prompt, split, template, rows)
    fingerprint = fingerprint or tokenizer_fingerprint(tokenizer)
    title = ", ".join(encoder.files)
    folder, arrays, stats = load_or_tokenize(config, split, readers, encoder, fingerprint, title)
    return PairDataset(arrays, stats, readers, template, encoder, folder)


def open_pairs(
    encoder_class: type[PreferenceEncoder],
    config: PreferenceDataConfig,
    share_prompt: bool,
    split: str,
    template: ChatTemplate,
    rows: Rows | None = None,
) -> tuple[list[Reader], PreferenceEncoder]:
    """Return the readers of a split (or one reader of rows in memory) and the encoder of the rows.

    Raises:
        ValueError: the path of the split is not set, does not exist, or lacks the split.
    """
    if (split == "train" or config.dev_ratio) and config.train_dataset_path is not None:
        config = replace(config, dataset_name_or_path=config.train_dataset_path)
    readers = open_dataset(config, split, rows=rows)
    limits = LengthLimits(config.src_length, config.max_length, config.truncation)
    names = tuple(reader.name for reader in readers)
    return readers, encoder_class(template, limits, False, names, share_prompt)
