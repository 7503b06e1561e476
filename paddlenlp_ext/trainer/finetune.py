"""A whole run: data, model, training, evaluation, as `llm/run_finetune.py` and `paddlenlp_ext.finetune` do it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build import build_trainer, load_data
from paddlenlp_ext.trainer.output_dir import check_output_dir
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")


@dataclass(frozen=True)
class FinetuneResult:
    """Outcome of a run.

    Attributes:
        output_dir: folder of the trained model or adapter, its results and its logs.
        metrics: what train_results.json and eval_results.json hold.
        trainer: the trainer, with its model, state and log history.
    """

    output_dir: Path
    metrics: dict[str, float]
    trainer: Trainer

    @property
    def model(self) -> Any:
        """The trained model."""
        return self.trainer.model


def finetune(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> FinetuneResult:
    """Fine-tune a model, as `llm/run_finetune.py` does with the same keys.

    It leaves threads and allocator of the process as they are; `configure_runtime()`, called before Paddle is
    imported, makes it several times faster on a CPU.

    Args:
        config: the keys of a run's JSON file with their values, or the path of such a file.
        overrides: further keys, which replace those of `config`.

    Raises:
        ConfigError: a `ValueError` that lists everything wrong with the keys.
        ValueError: what the keys ask for cannot be done; see the parts.
    """
    return run_training(load_config(config, **overrides))


def load_config(config: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> RunConfig:
    """Return the checked configuration of a run, such as `Trainer` takes it; arguments as `finetune`'s.

    Raises:
        ConfigError: a `ValueError` that lists everything wrong with the keys.
    """
    run_config = run_config_from(config, overrides, peft_methods())
    for note in run_config.notes:
        logger.info("%s", note)
    return run_config


def run_training(config: RunConfig) -> FinetuneResult:
    """Load data and model, train, save and evaluate, as far as the configuration says.

    Raises:
        ValueError: see the parts.
    """
    if is_main_rank():
        check_output_dir(config.train, config.model.model_name_or_path, config.peft.path if config.peft else None)
    trainer = build_trainer(config, load_data(config))
    metrics: dict[str, float] = {}
    if config.train.do_train:
        metrics |= trainer.train()
        trainer.save_model()
    if config.train.do_eval:
        metrics |= trainer.evaluate()
    return FinetuneResult(trainer.output_dir, metrics, trainer)
