"""Training programs of llm/, such as run_finetune.py and run_grpo.py: preview or audit rows, do a dry run, or train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.hub_upload import UploadError
from paddlenlp_ext.cli.dry_run import describe_run
from paddlenlp_ext.cli.next_steps import next_steps
from paddlenlp_ext.config import RunConfig, load_run_config
from paddlenlp_ext.config.run_config import SECTIONS
from paddlenlp_ext.data.audit.audit_splits import TRAIN
from paddlenlp_ext.data.audit.findings import ERROR
from paddlenlp_ext.data.audit.max_lost_targets import check_losses
from paddlenlp_ext.data.preview import preview_rows
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.checkpoints.output_dir import check_output_dir, locked_output_dir
from paddlenlp_ext.trainer.data_audit import PAGE, audit_run
from paddlenlp_ext.trainer.finetune import run_training
from paddlenlp_ext.trainer.import_dotted_paths import import_dotted_paths
from paddlenlp_ext.trainer.load_data import check_training_rows, load_data, load_tokenizing
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.logging import get_logger


def run_finetune(
    argv: Sequence[str],
    sections: Mapping[str, type] = SECTIONS,
    program: str = "run_finetune.py",
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Read the configuration from files and the command line, and run a training program.

    Args:
        argv: the command line without the program's name.
        sections: sections of the configuration: `SECTIONS`, `PREFERENCE_SECTIONS`, `REWARD_SECTIONS` or
            `GRPO_SECTIONS`.
        program: name of the program, for its help text.
        defaults: keys and values that files and arguments override.

    Raises:
        ValueError: invalid configuration, model, data or output_dir.
    """
    run_program(load_run_config(argv, peft_methods(), sections, program, defaults))


def run_program(config: RunConfig) -> None:
    """Preview or audit rows, do a dry run, or train, as the keys of `config.command` request."""
    for note in config.notes:
        get_logger().info("%s", note)
    if config.command.preview_data:
        _preview_data(config)
    elif config.command.audit_only:
        _audit_only(config)
    elif config.command.dry_run:
        _dry_run(config)
    else:
        try:
            run_training(config)
        except UploadError:
            _print_next_steps(config)
            raise
        _print_next_steps(config)


def _print_next_steps(config: RunConfig) -> None:
    if config.train.do_train and is_main_rank():
        print(next_steps(Path(str(config.train.output_dir)), _kind_of_result(config)), flush=True)


def _kind_of_result(config: RunConfig) -> str:
    if config.reward is not None:
        return "reward model"
    if config.peft is None:
        return "model"
    return "adapter" if config.peft.mergeable else "unmergeable"


def _preview_data(config: RunConfig) -> None:
    data = load_data(config)
    if is_main_rank():
        preview_rows(data.any_rows, data.tokenizer, config.command.preview_data)


def _audit_only(config: RunConfig) -> None:
    """Audit the rows and write the report.

    Raises:
        ValueError: the audit found errors, or too many target tokens or rows are lost (`max_lost_targets`).
    """
    if not is_main_rank():
        return
    with locked_output_dir(config):
        report = audit_run(config, load_tokenizing(config))
    for split in report.splits:
        if split.name == TRAIN:
            check_losses(split.rows.stats, config.data.max_lost_targets)
    if report.count(ERROR):
        page = Path(str(config.train.output_dir)) / PAGE
        raise ValueError(f"data audit: {report.summary}; {page} lists the findings with their remedies")


def _dry_run(config: RunConfig) -> None:
    if is_main_rank():
        check_output_dir(config)
    import_dotted_paths(config)
    data = load_data(config)
    check_training_rows(config, data.train_rows, data.eval_rows, data.max_context)
    if is_main_rank():
        describe_run(config, data)
