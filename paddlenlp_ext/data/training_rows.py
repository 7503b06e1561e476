"""Load the rows of a run as a stored dataset, a mixture of datasets, or a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.dataset import TokenizedDataset, load_split
from paddlenlp_ext.data.mixture import MixedDataset, parse_weights
from paddlenlp_ext.data.readers.dataset_files import dataset_names, open_dataset
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.streaming.source_cursor import Source
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import choose_template
from paddlenlp_ext.data.tokenization.cache_key import tokenizer_fingerprint
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder

TrainingRows = TokenizedDataset | MixedDataset | TokenStream


def load_rows(
    config: DataConfig,
    split: str,
    tokenizer: Any,
    template: ChatTemplate | None = None,
    fingerprint: str | None = None,
    rows: Rows | None = None,
) -> TrainingRows:
    """Load the rows of a split.

    | split and data keys | result |
    |---|---|
    | training rows with `lazy` | `TokenStream` over all datasets |
    | training rows with `train_dataset_prob`, without `lazy` | `MixedDataset` of one `TokenizedDataset` per dataset |
    | other rows | `TokenizedDataset`, in which several datasets follow each other |

    Args:
        config: `config.data` of a run.
        split: "train", "dev" or "test".
        tokenizer, template, fingerprint: see `load_dataset`.
        rows: rows in memory to use instead of `dataset_name_or_path`.

    Raises:
        ValueError: see `load_dataset`.
    """
    is_special = config.lazy or config.train_dataset_prob is not None
    if rows is not None or split != "train" or config.dataset_name_or_path is None or not is_special:
        return load_split(config, split, tokenizer, template, fingerprint, rows)
    names = dataset_names(config.dataset_name_or_path)
    weights = None if config.train_dataset_prob is None else parse_weights(config.train_dataset_prob, names)
    fingerprint = fingerprint or tokenizer_fingerprint(tokenizer)
    template = choose_template(config, tokenizer, template)
    if config.lazy:
        return _open_stream(config, names, weights, template, fingerprint)
    assert weights is not None
    parts = [
        load_split(replace(config, dataset_name_or_path=name), "train", tokenizer, template, fingerprint)
        for name in names
    ]
    return MixedDataset(parts, names, weights)


def _open_stream(
    config: DataConfig,
    names: Sequence[str],
    weights: Sequence[float] | None,
    template: ChatTemplate,
    fingerprint: str,
) -> TokenStream:
    opened = [open_dataset(replace(config, dataset_name_or_path=name), "train", is_stream=True) for name in names]
    if weights is None:
        sources = [Source(", ".join(names), [reader for readers in opened for reader in readers])]
    else:
        sources = [Source(*each) for each in zip(names, opened, weights, strict=True)]
    readers = [reader for source in sources for reader in source.readers]
    encoder = RowEncoder.from_config(config, template, readers)
    identity = {
        "shuffle_buffer_size": config.shuffle_buffer_size,
        "train_dataset_prob": config.train_dataset_prob or "unset",
        "data files": [(reader.name, reader.size) for reader in readers],
        "tokenizer, template and truncation": [
            fingerprint,
            template.identity,
            vars(encoder.limits),
            config.autoregressive,
        ],
        "bad_rows": config.bad_rows,
        **({} if config.column_mapping is None else {"column_mapping": config.column_mapping}),
    }
    return TokenStream(
        sources,
        encoder,
        bad_rows=config.bad_rows,
        max_lost_targets=config.max_lost_targets,
        num_workers=config.dataloader_num_workers,
        window_rows=config.shuffle_buffer_size,
        identity=identity,
    )
