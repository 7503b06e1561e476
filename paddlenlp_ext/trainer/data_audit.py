"""Audit of a run's data (`audit`, `--audit_only`): open the splits, and write the report to output_dir."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.dev_sets import dev_sets
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.data.audit.audit_splits import TRAIN, AuditedSplit, audit_splits, check_account
from paddlenlp_ext.data.audit.html_page import render_page
from paddlenlp_ext.data.audit.report import AuditReport
from paddlenlp_ext.data.preference.pair_dataset import open_pairs
from paddlenlp_ext.data.preference.tokenize_pairs import PreferenceEncoder
from paddlenlp_ext.data.preference.tokenize_reward_pairs import RewardEncoder
from paddlenlp_ext.data.readers.dataset_files import dataset_names, open_dataset
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.templates.load import choose_template
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.trainer.load_data import RunData, rows_by_dev_set
from paddlenlp_ext.utils.files import write_json, write_text
from paddlenlp_ext.utils.logging import get_logger

PAGE, RESULTS = "data_audit.html", "data_audit.json"
STREAM_ROWS = 100_000
"""Maximum number of audited rows of a stream."""
_COUNTS = ("num_read", "num_untruncated", "num_truncated", "num_dropped", "num_tokens", "num_target_tokens")


def audit_run(
    config: RunConfig,
    data: RunData,
    train_rows: Rows | None = None,
    eval_rows: Rows | Mapping[str, Rows] | None = None,
) -> AuditReport:
    """Audit the splits of a run, log the findings, and write data_audit.html and data_audit.json to output_dir.

    Args:
        config: the run's configuration.
        data: data of the run. If `data` has training rows, the audit is compared with the statistics of these rows.
        train_rows, eval_rows: rows in memory; see `load_data`.

    Raises:
        ValueError: a dataset does not exist, or a file is damaged.
    """
    eval_rows = train_rows if config.data.dev_ratio else eval_rows
    splits = _open_splits(config, data, train_rows, {} if eval_rows is None else rows_by_dev_set(eval_rows))
    names = list(dict.fromkeys(name for split in splits for name in split.encoder.files))
    report = audit_splits(splits, _title(config, names), config.data.dataset_num_proc, data.max_context)
    if data.train_rows is not None and not isinstance(data.train_rows, TokenStream):
        check_account(report.splits[0], {name: getattr(data.train_rows.stats, name) for name in _COUNTS})
    folder = Path(str(config.train.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULTS, report.to_json())
    write_text(folder / PAGE, render_page(report, data.tokenizer))
    get_logger().info("%s\n  written to %s", report.table(), folder / PAGE)
    return report


def _title(config: RunConfig, files: Sequence[str]) -> str:
    named = config.data.dataset_name_or_path
    return ", ".join(files[:2]) if named is None else ", ".join(dataset_names(named))


def _open_splits(
    config: RunConfig, data: RunData, train_rows: Rows | None, eval_rows: Mapping[str, Rows]
) -> list[AuditedSplit]:
    splits = [_open_split(config, config.data, TRAIN, TRAIN, data, train_rows)] if config.train.do_train else []
    if config.train.do_eval:
        for name, path in dev_sets(config.data).items():
            section = replace(config.data, dataset_name_or_path=path)
            splits.append(_open_split(config, section, "dev", f"dev {name}".strip(), data, eval_rows.get(name)))
    return splits


def _open_split(
    config: RunConfig, section: DataConfig, split: str, name: str, data: RunData, rows: Rows | None
) -> AuditedSplit:
    """Open a split with the readers and the encoder that training uses."""
    if config.preference is None and config.reward is None:
        is_stream = section.lazy and split == TRAIN
        readers = open_dataset(section, split, is_stream, rows)
        encoder = RowEncoder.from_config(section, choose_template(section, data.tokenizer, data.template), readers)
        return AuditedSplit(name, readers, encoder, STREAM_ROWS if is_stream else None)
    assert isinstance(section, PreferenceDataConfig), "preference and reward runs must have a PreferenceDataConfig"
    if config.reward is not None:
        opened = open_pairs(RewardEncoder, section, config.reward.share_prompt, split, data.template, rows)
    else:
        assert config.preference is not None, "a run on preference data must have the section preference or reward"
        opened = open_pairs(PreferenceEncoder, section, config.preference.share_prompt, split, data.template, rows)
    return AuditedSplit(name, *opened)
