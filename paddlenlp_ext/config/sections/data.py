"""Which rows, and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`config.data`."""

    dataset_name_or_path: str | None = option(
        None, help="folder with train.json and dev.json (or train/*.json, dev/*.json), or a built-in name"
    )
    task_name: str | None = option(None, aliases=("task_name_or_path",), help="part of a built-in dataset")
    src_length: int = option(1024, minimum=1, help="longest context of a row, in tokens")
    max_length: int = option(2048, minimum=2, help="longest row (context + answer), and the size of a pack, in tokens")
    truncation: str = option(
        "right",
        choices=("right", "left", "drop", "error"),
        help="what becomes of a longer row: cut on that side, leave it out, or stop",
    )
    bad_rows: str = option("error", choices=("error", "drop"), help="what becomes of a row that can't be read")
    chat_template: str | None = option(
        None, help="file with a chat template; absent: the tokenizer's own; none: no template"
    )
    zero_padding: bool = option(False, aliases=("intokens",), help="pack several rows into one of max_length")
    greedy_zero_padding: bool = option(False, help="choose the rows of a pack so that little room is left")
    pad_to_multiple_of: int | None = option(None, minimum=1, help="pad a batch's rows to a multiple of this length")
    pad_to_max_length: bool = option(False, help="pad every row to max_length")
    lazy: bool = option(False, help="read rows while training")
    autoregressive: bool = option(False, help="learn every token of src (plain language modelling)")
    data_cache_dir: str | None = option(
        None, help="folder for tokenized data; absent: .cache/paddlenlp_ext/data in the home folder"
    )
