"""Tokenize a split of preference data once, and map its tokens from the cache of `data.dataset`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.data.dataset import (
    TokenizedDataset,
    cache_dir,
    cache_key,
    template_options,
    tokenizer_fingerprint,
)
from paddlenlp_ext.data.preference.encode import TokenizedPreference, encode_preferences
from paddlenlp_ext.data.preference.rows import unknown_preference_fields
from paddlenlp_ext.data.preference.types import EncodedPreference
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.sources import dataset_names, open_reader, open_split
from paddlenlp_ext.data.store import TokenArrays, TokenWriter, load_or_build
from paddlenlp_ext.data.templates import ChatTemplate, load_template
from paddlenlp_ext.data.tokenize import LengthLimits
from paddlenlp_ext.data.types import MAX_LISTED, DataError, DataStats, InvalidRow, SourceRow
from paddlenlp_ext.utils.logging import get_logger


class PreferenceDataset(TokenizedDataset):
    """Tokenized rows of preference data, mapped from disk; an item is an `EncodedPreference`.

    Attributes:
        lengths: int64 [rows], number of positions of each row in a batch.
        num_answers: int64 [rows], 2 for a pair and 1 for a rated answer.
        stats: numbers of rows and tokens.
        cache_folder: folder of the cached tokens; its name is a hash of everything that determines them.
    """

    def __init__(
        self,
        arrays: TokenArrays,
        stats: DataStats,
        readers: Sequence[Reader],
        template: ChatTemplate,
        share_prompt: bool,
        cache_folder: Path,
    ) -> None:
        super().__init__(arrays, stats, readers, template, autoregressive=False)
        self.cache_folder = cache_folder
        self._share_prompt = share_prompt
        num_tokens = self.lengths + 1
        prompt_lengths = arrays.answers[:, 0]
        self.num_answers = 1 + (arrays.answers[:, 1] < num_tokens)
        copies = 1 if share_prompt else self.num_answers
        self.lengths = num_tokens - prompt_lengths + copies * (prompt_lengths - 1)

    def __getitem__(self, index: int) -> EncodedPreference:
        row = super().__getitem__(index)
        first, second, is_desirable = self._arrays.answers[index].tolist()
        is_pair = second < len(row.tokens)
        return EncodedPreference(
            row.tokens,
            row.loss_mask,
            row.row_index,
            answer_starts=(first, second) if is_pair else (first,),
            is_desirable=(True, False) if is_pair else (bool(is_desirable),),
            share_prompt=self._share_prompt,
        )

    def prompts(self) -> Iterator[tuple[list[int], str, str]]:
        """Raise an error: answers of preference data are compared, not generated."""
        raise ValueError("eval_with_do_generation: answers of preference data are compared; set it to false")


def load_preference_dataset(
    config: PreferenceDataConfig,
    preference: PreferenceConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
) -> PreferenceDataset:
    """Tokenize a split, or map its tokens from the cache.

    Args:
        config: `config.data` of a run; the training rows are those of `train_dataset_path` if it is set, and all others
            are those of `dataset_name_or_path`.
        preference: `config.preference` of the run.
        split: "train" or "dev".
        tokenizer: a Hugging Face tokenizer.
        template: the result of `load_template(config.chat_template, tokenizer)`, if already computed.
        fingerprint: the result of `tokenizer_fingerprint(tokenizer)`, if already computed.

    Raises:
        ValueError: the files do not exist or have no valid row, the cache cannot be written, or the loss compares
            pairs and a row has one answer.
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
    """
    readers = _readers(config, split)
    names = [reader.name for reader in readers]
    template = template or load_template(config.chat_template, tokenizer, template_options(config))
    limits = LengthLimits(config.src_length, config.max_length, config.truncation)
    share_prompt = preference.share_prompt
    key = cache_key(
        readers=readers,
        tokenizer=fingerprint or tokenizer_fingerprint(tokenizer),
        template_text=template.identity,
        options={**vars(limits), "bad_rows": config.bad_rows, "rows": "preference", "share_prompt": share_prompt},
    )
    folder = cache_dir(config) / f"{split}-{key[:32]}"

    def build(folder: Path) -> DataStats:
        rows = (row for reader in readers for row in reader.rows())
        arrays, stats = tokenize_preferences(rows, names, template, limits, share_prompt, config.bad_rows)
        with TokenWriter(folder) as writer:
            writer.append(arrays)
        return stats

    arrays, stats = load_or_build(folder, build)
    get_logger().info("%s", stats.table(f"{split} rows of {', '.join(names)}"))
    for line in (*map("dropped: {}".format, stats.examples), *stats.describe_unknown_fields()):
        get_logger().info("%s", line)
    dataset = PreferenceDataset(arrays, stats, readers, template, share_prompt, folder)
    if preference.loss_type != "kto" and (dataset.num_answers == 1).any():
        file, line_number = dataset.source(int((dataset.num_answers == 1).argmax()))
        raise ValueError(
            f"{file}:{line_number}: the row has one answer, and loss_type {preference.loss_type} compares two; set "
            "loss_type kto, or add a second answer"
        )
    return dataset


def _readers(config: PreferenceDataConfig, split: str) -> list[Reader]:
    """Return the readers of a split, in the order of their names.

    Raises:
        ValueError: the path is not set, or it does not exist or lacks the split.
    """
    written = config.dataset_name_or_path
    if split == "train" and config.train_dataset_path is not None:
        written = config.train_dataset_path
    if written is None:
        raise ValueError(f"{split}_dataset_path: not set; use a file with one JSON object per line")
    readers: list[Reader] = []
    for name in dataset_names(written):
        path = Path(name).expanduser()
        readers += [open_reader(path)] if path.is_file() else open_split(name, split, config.task_name)
    return readers


def tokenize_preferences(
    rows: Iterable[SourceRow | InvalidRow],
    files: Sequence[str],
    template: ChatTemplate,
    limits: LengthLimits,
    share_prompt: bool = True,
    bad_rows: str = "error",
) -> tuple[TokenArrays, DataStats]:
    """Tokenize rows, and count the untruncated, truncated and dropped ones.

    The `answers` of the arrays are int64 [rows, 3], as in `TokenizedPreference`.

    Args:
        rows: rows of a split, as read.
        files: names of the files that the rows were read from; locations store indices into this list.
        template: chat template that renders conversations.
        limits: `src_length`, `max_length` and `truncation`.
        share_prompt: as for `encode_preferences`.
        bad_rows: "error" or "drop".

    Raises:
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
        ValueError: no row is valid.
    """
    unknown: dict[str, Counter[str]] = {}
    results = list(encode_preferences(_count_unknown_fields(rows, unknown), template, limits, share_prompt))
    valid = [row for row in results if not isinstance(row, InvalidRow)]
    dropped = [row for row in results if isinstance(row, InvalidRow)]
    invalid = [row for row in dropped if not row.by_policy]
    if invalid and (bad_rows == "error" or any(row.fatal for row in invalid)):
        raise DataError(invalid if bad_rows == "error" else [row for row in invalid if row.fatal])
    stats = DataStats(
        num_read=len(results),
        num_untruncated=sum(row.num_truncated_tokens == 0 for row in valid),
        num_truncated=sum(row.num_truncated_tokens > 0 for row in valid),
        num_tokens=sum(len(row.tokens) for row in valid),
        num_target_tokens=sum(int(row.loss_mask.sum()) for row in valid),
        num_truncated_tokens=sum(row.num_truncated_tokens for row in valid),
        unknown_fields={file: dict(counts) for file, counts in unknown.items()},
    )
    stats.drop(dropped, MAX_LISTED)
    stats.check()
    if not valid:
        listed = "".join(f"\n  {problem}" for problem in stats.examples)
        raise ValueError(f"{', '.join(files)}: no valid row\n{stats.table()}{listed}")
    return _arrays(valid, files), stats


def _arrays(rows: Sequence[TokenizedPreference], files: Sequence[str]) -> TokenArrays:
    file_index: dict[str | None, int] = {file: index for index, file in enumerate(files)}
    locations = [(file_index[row.location.file], row.location.line, row.location.column) for row in rows]
    return TokenArrays(
        tokens=np.concatenate([row.tokens for row in rows]),
        loss_mask=np.concatenate([row.loss_mask for row in rows]),
        offsets=np.cumsum([0, *(len(row.tokens) for row in rows)], dtype=np.int64),
        locations=np.array(locations, dtype=np.int64),
        answers=np.array([row.answers for row in rows], dtype=np.int64),
    )


def _count_unknown_fields(
    rows: Iterable[SourceRow | InvalidRow], unknown: dict[str, Counter[str]]
) -> Iterator[SourceRow | InvalidRow]:
    for row in rows:
        if isinstance(row, SourceRow):
            for name in unknown_preference_fields(row.value):
                unknown.setdefault(str(row.location.file), Counter())[name] += 1
        yield row
