"""Configuration section for the training data: datasets, truncation, packing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.config.dataclass_options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class DataConfig(OptionGroup):
    """`config.data`: datasets, truncation, packing."""

    dataset_name_or_path: str | list[str] | None = option(  # noqa: RUF009 (as every option)
        None,
        aliases=("data",),
        winning_aliases=("task_name_or_path",),
        help="training rows: file, folder with train.json and dev.json, built-in name or hub id (docs/data.md); "
        "commas separate several datasets",
    )
    train_dataset_prob: str | None = option(
        None, help="mixing weights of the training datasets in dataset_name_or_path, such as 0.7,0.3"
    )
    task_name: str | None = option(None, help="name of the configuration (subset) of a hub dataset")
    column_mapping: dict[str, Any] | None = option(  # noqa: RUF009 (the default is null)
        None, help='columns to rename to the fields of a row format, such as {"question": "src", "answer": "tgt"}'
    )
    dataset_num_proc: int | None = option(
        None, minimum=1, help="on Linux: number of processes that tokenize a dataset; unset: at most one per processor"
    )
    eval_dataset_path: tuple[str, ...] | Mapping[str, Any] | None = option(
        None,
        aliases=("eval_dataset",),
        help="datasets for evaluation: a path, a list of paths, or an object {name: path}; unset: dev split of "
        "dataset_name_or_path",
    )
    dev_ratio: float = option(
        0.0,
        minimum=0,
        help="training rows to hold out as eval rows: a fraction below 1, or an approximate number of rows; a hash of "
        "the content selects the rows",
    )
    src_length: int = option(1024, minimum=1, help="maximum number of tokens in a prompt")
    max_length: int = option(2048, minimum=2, help="maximum number of tokens in a row (prompt and answer) or pack")
    truncation: str = option(
        "right",
        choices=("right", "left", "drop", "error"),
        aliases=("truncation_side",),
        help="treatment of rows longer than max_length and of prompts longer than src_length: truncate right or left, "
        "drop the row, or stop with an error",
    )
    bad_rows: str = option(
        "error",
        choices=("error", "drop"),
        aliases=("on_invalid_row",),
        synonyms={"raise": "error", "skip": "drop"},
        help="treatment of invalid rows: error (or raise) stops with an error, drop (or skip) drops the row",
    )
    chat_template: str | None = option(
        None, help="file with a chat template; unset: the template of the tokenizer; none: no template"
    )
    chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (the default is null)
        None, help='variables for the chat template, such as {"enable_thinking": false}; rows may override variables'
    )
    learn_empty_think: bool = option(
        False, help="train on the empty reasoning block that a template writes before an answer"
    )
    mask_reasoning: bool = option(False, help="exclude the reasoning in answers from the loss")
    zero_padding: bool = option(
        False, winning_aliases=("intokens",), help="pack consecutive rows into sequences of at most max_length tokens"
    )
    greedy_zero_padding: bool = option(
        False, help="with zero_padding: choose rows whose lengths fill a pack, instead of consecutive rows"
    )
    share_prefix: bool = option(
        False,
        help="with zero_padding: compute the common prefix of rows, such as a system prompt or few-shot examples, once "
        "per pack, so that more rows fit in a pack",
    )
    pad_to_multiple_of: int | None = option(
        None, minimum=1, maximum=65536, help="pad batches to a multiple of this many positions"
    )
    pad_to_max_length: bool = option(False, help="pad every row (or pack) to max_length")
    lazy: bool = option(False, help="stream rows: read and tokenize rows during training, in constant memory")
    shuffle_buffer_size: int = option(
        8192, minimum=1, help="with lazy: number of consecutive rows that are shuffled and packed together"
    )
    dataloader_num_workers: int = option(
        0,
        minimum=0,
        help="with lazy: number of processes that tokenize in the background; 0: tokenize in the training process",
    )
    autoregressive: bool = option(
        False, help="train on every token of the field src or text (plain language modelling)"
    )
    use_pose_convert: bool = option(
        False, help="PoSE: skip position ids within each row, up to the model's context length"
    )
    data_cache_dir: str | None = option(
        None, help="folder for tokenized data; unset: .cache/paddlenlp_ext/data in the home folder"
    )
    audit: bool = option(False, help="check the rows before training, and write data_audit.html to output_dir")
    max_lost_targets: float = option(
        0.2,
        minimum=0,
        maximum=1,
        help="stop if more than this fraction of the rows is dropped, or if truncation and dropped rows remove more "
        "than this fraction of the target tokens",
    )

    @property
    def is_stream(self) -> bool:
        """Return whether rows are read during training."""
        return self.lazy

    def paths(self, train: bool, evaluate: bool) -> dict[str, Any]:
        """Return the required dataset key with its value; None: missing.

        If the run does not train, `eval_dataset_path` may replace `dataset_name_or_path`.
        """
        return {"dataset_name_or_path": self.dataset_name_or_path or (None if train else self.eval_dataset_path)}
