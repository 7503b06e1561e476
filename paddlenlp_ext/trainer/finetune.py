"""Run training from data to evaluation, for the programs of `llm/` and their Python functions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.parallel.gloo import connect_processes
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.checkpoints.output_dir import check_output_dir, locked_output_dir
from paddlenlp_ext.trainer.data_audit import audit_run, check_training_rows
from paddlenlp_ext.trainer.run_data import load_data
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a run.

    Attributes:
        output_dir: folder with the trained model or adapter, metrics and logs.
        metrics: contents of train_results.json and eval_results.json.
        trainer: the trainer, with its model, state and log history.
    """

    output_dir: Path
    metrics: dict[str, float]
    trainer: Trainer

    @property
    def model(self) -> Any:
        """Return the trained model."""
        return self.trainer.model


def finetune(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> FinetuneResult:
    """Fine-tune a model, as `llm/run_finetune.py` does with the same keys.

    On a CPU, call `configure_runtime()` before Paddle is imported: training is then several times faster. `finetune`
    itself does not change the process's threads or allocator.

    Args:
        config: keys of a run with their values, or the path of a JSON file.
        overrides: keys and values that replace keys of `config`.

    Raises:
        ConfigError: keys are unknown or invalid; this `ValueError` lists all problems.
        ValueError: the model, adapter, data or output_dir cannot be used; the message names it.

    Examples:
        >>> result = finetune("sft.json", lora=True, output_dir="out")  # doctest: +SKIP
        >>> result.metrics["train_loss"]  # doctest: +SKIP
    """
    return run_training(load_config(config, **overrides))


def dpo(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> FinetuneResult:
    """Train a model on preferences, as `llm/run_dpo.py` does with the same keys (docs/preference.md).

    Arguments and errors are the same as for `finetune`.

    Examples:
        >>> dpo("dpo.json", loss_type="ipo")  # doctest: +SKIP
    """
    return run_training(_load(config, overrides, PREFERENCE_SECTIONS))


def train_reward_model(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> FinetuneResult:
    """Train a reward model, as `llm/run_reward.py` does with the same keys (docs/preference.md).

    Arguments and errors are the same as for `finetune`.

    Examples:
        >>> train_reward_model("reward.json", train_dataset_path="pairs.jsonl")  # doctest: +SKIP
    """
    return run_training(_load(config, overrides, REWARD_SECTIONS))


reward = train_reward_model
"""Earlier name of `train_reward_model`."""


def load_config(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> RunConfig:
    """Return the checked configuration of a run, for `Trainer`; arguments are the same as for `finetune`.

    Raises:
        ConfigError: keys are unknown or invalid; this `ValueError` lists all problems.
    """
    return _load(config, overrides, SECTIONS)


def _load(
    config: Mapping[str, Any] | str | os.PathLike[str], overrides: Mapping[str, Any], sections: Mapping[str, type]
) -> RunConfig:
    run_config = run_config_from(config, overrides, peft_methods(), sections)
    for note in run_config.notes:
        logger.info("%s", note)
    return run_config


def run_training(config: RunConfig) -> FinetuneResult:
    """Load data and model, then train and save the model (`do_train`) and evaluate (`do_eval`).

    Raises:
        ValueError: the model, adapter, data or output_dir cannot be used; the message names it.
    """
    started = time.monotonic()
    connect_processes()
    with locked_output_dir(config):
        if is_main_rank():
            check_output_dir(config)
        data = load_data(config)
        check_training_rows(config, data)
        trainer = build_trainer(config, data)
        trainer.started = started
        if config.data.audit:
            if is_main_rank():
                audit_run(config, data)
            trainer.process_group.barrier()
        return train_and_evaluate(trainer)


def train_and_evaluate(trainer: Trainer) -> FinetuneResult:
    """Train and save the model (`do_train`), then evaluate it (`do_eval`)."""
    metrics: dict[str, float] = {}
    if trainer.config.train.do_train:
        metrics |= trainer.train()
        trainer.save_model()
    if trainer.config.train.do_eval:
        metrics |= trainer.evaluate()
    return FinetuneResult(trainer.output_dir, metrics, trainer)
