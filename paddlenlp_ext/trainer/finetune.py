"""Run training, from loading the data to evaluation: `finetune`, `dpo`, `grpo` and `train_reward_model`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import GRPO_SECTIONS, PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.readers.in_memory import Rows
from paddlenlp_ext.parallel.gloo import connect_processes
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.report.run_folder import HISTORY_FILE
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.callbacks.history_file import write_early_failure
from paddlenlp_ext.trainer.callbacks.report_page import refresh_report
from paddlenlp_ext.trainer.checkpoints.output_dir import check_output_dir, locked_output_dir
from paddlenlp_ext.trainer.data_audit import audit_run
from paddlenlp_ext.trainer.hub import check_push, push_run
from paddlenlp_ext.trainer.import_dotted_paths import import_dotted_paths
from paddlenlp_ext.trainer.load_data import Dataset, check_training_rows, dataset_keys, load_data, rows_in_memory
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.storage_errors import StorageError

logger = get_logger("paddlenlp_ext.trainer")


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a run.

    Attributes:
        output_dir: folder with the trained model or adapter, metrics and logs.
        metrics: merged contents of train_results.json, eval_results.json and test_results.json.
        trainer: the trainer, with model, state and log history.
    """

    output_dir: Path
    metrics: dict[str, float]
    trainer: Trainer

    @property
    def model(self) -> Any:
        """Return the trained model."""
        return self.trainer.model


def finetune(
    config: Mapping[str, Any] | str | os.PathLike[str],
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    **overrides: Any,
) -> FinetuneResult:
    """Fine-tune a model. `llm/run_finetune.py` accepts the same keys.

    On a CPU, call `configure_runtime()` before Paddle is imported. The call sets the number of threads and the memory
    allocator of the process, and makes training several times faster than Paddle's defaults. `finetune` does not change
    these settings.

    Args:
        config: keys and values of a run (docs/configuration.md), or the path of a JSON or YAML file.
        train_dataset: rows as a list of dicts, a `datasets.Dataset` or a path, in place of the training rows that
            `config` names; enables `do_train`.
        eval_dataset: evaluation rows as a list of dicts, a `datasets.Dataset` or a path; or a dict with the rows of
            several dev sets by name; enables `do_eval`.
        overrides: keys and values that replace keys of `config`.

    Raises:
        ConfigError: keys are unknown or invalid; the message lists all problems. It is a `ValueError`.
        ValueError: the model, adapter, data or output_dir cannot be used; the message names the problem.

    Examples:
        >>> result = finetune("sft.json", lora=True, output_dir="out")  # doctest: +SKIP
        >>> result.metrics["train_loss"]  # doctest: +SKIP
    """
    return _run(config, train_dataset, eval_dataset, overrides, SECTIONS)


def dpo(
    config: Mapping[str, Any] | str | os.PathLike[str],
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    **overrides: Any,
) -> FinetuneResult:
    """Train a model on preferences (docs/preference.md). `llm/run_dpo.py` accepts the same keys.

    Arguments and errors are the same as for `finetune`.

    Examples:
        >>> dpo("dpo.json", loss_type="ipo")  # doctest: +SKIP
    """
    return _run(config, train_dataset, eval_dataset, overrides, PREFERENCE_SECTIONS)


def train_reward_model(
    config: Mapping[str, Any] | str | os.PathLike[str],
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    **overrides: Any,
) -> FinetuneResult:
    """Train a reward model (docs/preference.md). `llm/run_reward.py` accepts the same keys.

    Arguments and errors are the same as for `finetune`.

    Examples:
        >>> train_reward_model("reward.json", train_dataset_path="pairs.jsonl")  # doctest: +SKIP
    """
    return _run(config, train_dataset, eval_dataset, overrides, REWARD_SECTIONS)


def grpo(
    config: Mapping[str, Any] | str | os.PathLike[str],
    train_dataset: Dataset | None = None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
    **overrides: Any,
) -> FinetuneResult:
    """Train a model with GRPO on its own answers (docs/grpo.md). `llm/run_grpo.py` accepts the same keys.

    Arguments and errors are the same as for `finetune`.

    Examples:
        >>> grpo("grpo.json", reward_funcs="my_rewards.correct")  # doctest: +SKIP
    """
    return _run(config, train_dataset, eval_dataset, overrides, GRPO_SECTIONS)


reward = train_reward_model
"""Earlier name of `train_reward_model`."""


def load_config(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> RunConfig:
    """Return the checked configuration of a run, for `Trainer`; see `finetune` for the arguments.

    Raises:
        ConfigError: keys are unknown or invalid; this `ValueError` lists all problems.
    """
    return _load(config, overrides, SECTIONS)


def _run(
    config: Mapping[str, Any] | str | os.PathLike[str],
    train_dataset: Dataset | None,
    eval_dataset: Dataset | Mapping[str, Dataset] | None,
    overrides: Mapping[str, Any],
    sections: Mapping[str, type],
) -> FinetuneResult:
    """Train on the given datasets in place of the datasets that the configuration names; see `finetune`."""
    named = {key: value for key, value in dataset_keys(train_dataset, eval_dataset).items() if value}
    if train_dataset is not None and hasattr(sections["data"], "train_dataset_path"):
        named["train_dataset_path"] = None
    run_config = _load(config, {**overrides, **named}, sections)
    return run_training(run_config, rows_in_memory(train_dataset), rows_in_memory(eval_dataset))


def _load(
    config: Mapping[str, Any] | str | os.PathLike[str], overrides: Mapping[str, Any], sections: Mapping[str, type]
) -> RunConfig:
    run_config = run_config_from(config, overrides, peft_methods(), sections)
    for note in run_config.notes:
        logger.info("%s", note)
    return run_config


def run_training(
    config: RunConfig, train_rows: Rows | None = None, eval_rows: Rows | Mapping[str, Rows] | None = None
) -> FinetuneResult:
    """Load data and model, train and save the model (`do_train`), evaluate it (`do_eval`) and test it (`do_predict`).

    Args:
        config: configuration of the run.
        train_rows, eval_rows: rows in memory; see `load_data`.

    Raises:
        ValueError: the model, adapter, data or output_dir cannot be used, or the upload failed (`push_to_hub`); the
            message names the problem.
    """
    started = time.monotonic()
    connect_processes(config.precision.device)
    with locked_output_dir(config):
        if is_main_rank():
            check_output_dir(config)
            check_push(config.train)
        with _reported_failure(config):
            import_dotted_paths(config)
            data = load_data(config, train_rows, eval_rows)
            check_training_rows(config, data.train_rows, data.eval_rows, data.max_context)
            trainer = build_trainer(config, data)
            trainer.started = started
            if config.data.audit:
                if is_main_rank():
                    audit_run(config, data, train_rows, eval_rows)
                trainer.process_group.barrier()
            return train_and_evaluate(trainer, data.test_rows)


@contextmanager
def _reported_failure(config: RunConfig) -> Iterator[None]:
    """Write report.html if the run fails before its first step; the history of an earlier run is preserved."""
    output_dir = Path(str(config.train.output_dir))
    try:
        yield
    except Exception as error:
        if config.train.do_train and is_main_rank() and not (output_dir / HISTORY_FILE).exists():
            try:
                write_early_failure(output_dir, config, error)
                refresh_report(output_dir)
            except StorageError as problem:
                logger.warning("no report of the failure was written: %s", problem)
        raise


def train_and_evaluate(trainer: Trainer, test_rows: TokenizedDataset | None = None) -> FinetuneResult:
    """Train and save the model (`do_train`), evaluate it (`do_eval`), test it, and upload it (`push_to_hub`).

    Raises:
        UploadError: the upload failed (`push_to_hub`); all other results are saved.
    """
    metrics: dict[str, float] = {}
    if trainer.config.train.do_train:
        metrics |= trainer.train_without_upload()
        trainer.save_model()
    if trainer.config.train.do_eval:
        metrics |= trainer.evaluate()
    if test_rows is not None:
        metrics |= trainer.predict(test_rows)
    if trainer.config.train.push_to_hub and is_main_rank():
        push_run(trainer.config.train)
    return FinetuneResult(trainer.output_dir, metrics, trainer)
