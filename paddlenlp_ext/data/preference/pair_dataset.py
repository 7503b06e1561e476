"""Load preference data: tokenize a split once, then memory-map its tokens from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.preference.tokenize_reward_pairs import RewardEncoder
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.readers.base import Reader
from paddlenlp_ext.data.readers.dataset_files import dataset_names, open_reader, open_split
from paddlenlp_ext.data.readers.in_memory import InMemoryReader, Rows
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import load_configured_template
from paddlenlp_ext.data.tokenization.cache_key import cache_key, tokenizer_fingerprint
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.data.tokenization.token_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.token_cache import cache_dir, load_or_build
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.data.tokenization.workers import tokenize


class PairDataset(TokenizedDataset):
    """Tokenized rows of preference data, mapped from disk; an item is a `TokenizedPair`.

    Args:
        arrays, stats, readers, template: as for `TokenizedDataset`.
        encoder: encoder of the rows.
        cache_folder: folder of the cached tokens; its name is a hash of everything that determines them.

    Attributes:
        lengths: int64 [rows], number of positions of each row in a batch.
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
        """Raise an error, because answers of preference data are compared, not generated."""
        raise ValueError("eval_with_do_generation: answers of preference data are compared; set it to false")


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
        config: `config.data` of a run; training rows come from `train_dataset_path` if it is set, and all other rows
            come from `dataset_name_or_path`.
        preference: `config.preference` of the run.
        split: "train" or "dev".
        tokenizer: a Hugging Face tokenizer.
        template: the result of `load_template(config.chat_template, tokenizer)`, if already computed.
        fingerprint: the result of `tokenizer_fingerprint(tokenizer)`, if already computed.
        rows: rows in memory, in place of the files.

    Raises:
        ValueError: the files do not exist or have no valid row, the cache cannot be written, or the loss compares
            pairs and a row has one answer.
        DataError: rows are invalid and `bad_rows` is "error", or a file with one JSON array has a syntax error.
    """
    shared = (tokenizer, template, fingerprint, rows)
    dataset = load_pairs(PreferenceEncoder, config, preference.share_prompt, split, *shared)
    if preference.loss_type != "kto" and (dataset.num_answers == 1).any():
        file, line_number = dataset.source(int((dataset.num_answers == 1).argmax()))
        raise ValueError(
            f"{file}:{line_number}: the row has one answer, and loss_type {preference.loss_type} compares two; set "
            "loss_type kto, or add a second answer"
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

    Arguments and errors are the same as for `load_preference_dataset`, but the loss is not checked.
    """
    template = template or load_configured_template(config, tokenizer)
    readers, encoder = open_pairs(encoder_class, config, share_prompt, split, template, rows)
    limits = encoder.limits
    key = cache_key(
        readers=readers,
        tokenizer=fingerprint or tokenizer_fingerprint(tokenizer),
        template_text=template.identity,
        options={
            **vars(limits),
            "bad_rows": config.bad_rows,
            "rows": encoder_class.rows_key,
            "share_prompt": share_prompt,
        },
    )

    def build(folder: Path) -> DataStats:
        return tokenize(readers, encoder, folder, config.bad_rows, config.dataset_num_proc)

    folder = cache_dir(config) / f"{split}-{key[:32]}"
    arrays, stats = load_or_build(folder, build)
    stats.log(f"{split} rows of {', '.join(encoder.files)}")
    return PairDataset(arrays, stats, readers, template, encoder, folder)


def open_pairs(
    encoder_class: type[PreferenceEncoder],
    config: PreferenceDataConfig,
    share_prompt: bool,
    split: str,
    template: ChatTemplate,
    rows: Rows | None = None,
) -> tuple[list[Reader], PreferenceEncoder]:
    """Return the readers of a split, or of rows in memory, and the encoder of the rows.

    Raises:
        ValueError: the path is not set, or it does not exist or lacks the split.
    """
    readers = _readers(config, split) if rows is None else [InMemoryReader(rows)]
    limits = LengthLimits(config.src_length, config.max_length, config.truncation)
    names = tuple(reader.name for reader in readers)
    return readers, encoder_class(template, limits, False, names, share_prompt)


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
