"""Train a tiny model on random rows with the trainer of `llm/run_finetune.py`."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.doctor.devices_and_dtypes import Target
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.registry import PEFT_METHODS, peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.load_data import RunData
from paddlenlp_ext.trainer.trainer_state import StepReport, TrainerState
from paddlenlp_ext.utils.logging import get_logger

TINY_MODEL: dict[str, Any] = json.loads((Path(__file__).parent / "tiny_model.json").read_text(encoding="utf-8"))
"""Model config with sizes that all kernels support: 64 input features, heads of 16 channels."""
STEPS = 2
_NUM_ROWS = 16
_REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {"trainable_tokens": {"indices": (3, 38, 51)}}
_KEYS: dict[str, Any] = {
    "dataset_name_or_path": "rows in memory",
    "do_train": True,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    # Adam divides a gradient by its magnitude. With a small epsilon, rounding errors near zero would become full
    # updates.
    "adam_epsilon": 1e-4,
    "per_device_train_batch_size": 2,
    "zero_padding": True,
    "max_length": 64,
    "src_length": 32,
    "save_strategy": "no",
    "disable_tqdm": True,
}


_PROMPT = 4
"""Number of prompt tokens of each data row."""


def answer_row(tokens: np.ndarray, loss_mask: np.ndarray, index: int) -> EncodedRow:
    """Return a row for supervised fine-tuning."""
    return EncodedRow(tokens, loss_mask, index)


def pair_row(tokens: np.ndarray, loss_mask: np.ndarray, index: int) -> TokenizedPair:
    """Return a preference pair whose rejected answer is the last three tokens."""
    return TokenizedPair(tokens, loss_mask, index, (_PROMPT, len(tokens) - 3), (True, False))


def scored_row(tokens: np.ndarray, loss_mask: np.ndarray, index: int) -> TokenizedPair:
    """Return a pair for a reward model, with a margin."""
    return replace(pair_row(tokens, loss_mask, index), scores_last_tokens=True, margin=0.25)


class Kind(NamedTuple):
    """Kind of training run: sections of the run configuration, and the function that creates a row."""

    sections: dict[str, type]
    row: Callable[[np.ndarray, np.ndarray, int], EncodedRow]


KINDS = {
    "sft": Kind(SECTIONS, answer_row),
    "dpo": Kind(PREFERENCE_SECTIONS, pair_row),
    "reward": Kind(REWARD_SECTIONS, scored_row),
}


class Rows:
    """Random rows in memory with the interface of a TokenizedDataset.

    Args:
        row: function that creates a row from tokens, loss mask and index.
        cache_folder: folder for the log-probabilities of the reference model.
    """

    def __init__(self, row: Callable[[np.ndarray, np.ndarray, int], EncodedRow], cache_folder: Path) -> None:
        generator = np.random.default_rng(0)
        self.rows, self.cache_folder = [], cache_folder
        for index in range(_NUM_ROWS):
            tokens = generator.integers(1, TINY_MODEL["vocab_size"], int(generator.integers(8, 40))).astype(np.int32)
            self.rows.append(row(tokens, np.arange(len(tokens)) >= _PROMPT, index))
        self.lengths = np.array([row.length for row in self.rows], np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EncodedRow:
        return self.rows[index]

    def source(self, index: int) -> tuple[str, int]:
        """Return the location of a row for error messages."""
        return "rows in memory", index + 1


class Steps(Callback):
    """Callback that collects step reports, and clears the log history to avoid the slow plot of loss.png."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step_end(self, state: TrainerState, report: StepReport) -> None:
        self.reports.append(report)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        state.log_history.clear()


def precision_keys(target: Target) -> dict[str, Any]:
    """Return the configuration keys for the device and dtype of a target."""
    return {
        "device": target.device,
        "use_flash_attention": capabilities(target.device).flash_mask,
        "bf16": target.dtype == "bfloat16",
        "fp16": target.dtype == "float16",
    }


def run_training(
    keys: Mapping[str, Any],
    switch: str | None = None,
    algorithm: str | None = None,
    output_dir: Path | None = None,
    kind: str = "sft",
) -> list[float]:
    """Train a new tiny model for two steps; return the two losses, followed by the two gradient norms.

    Args:
        keys: configuration keys that extend or override `_KEYS`.
        switch: adapter method; None: train all weights.
        algorithm: quantized format of the frozen base model (`weight_quantize_algo`); None: not quantized.
        output_dir: output folder, which all processes of the run share; None: a temporary folder.
        kind: kind of rows and loss, a key of `KINDS`.
    """
    with tempfile.TemporaryDirectory() as temporary, quiet_logging():
        folder = Path(temporary, "model")
        AutoModelForCausalLM.from_config(TINY_MODEL, seed=1).save_pretrained(folder)
        output = str(output_dir or Path(temporary, "output"))
        paths = {"model_name_or_path": str(folder), "output_dir": output}
        config = run_config_from({**_KEYS, **paths, **keys}, {}, peft_methods(), KINDS[kind].sections)
        if switch is not None:
            method = PEFT_METHODS.get(switch)(**_REQUIRED_OPTIONS.get(switch, {}))
            model = replace(config.model, weight_quantize_algo=algorithm)
            config = replace(config, model=model, peft=method, peft_switch=switch)
        source = ModelSource.from_config(config.model)
        if config.reward is not None:
            source = source.as_classifier(config.train.seed, pad_token_id=0)
        rows = cast("TokenizedDataset", Rows(KINDS[kind].row, Path(temporary)))
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
        data, steps = RunData(source, tokenizer, SimpleNamespace(stop_token_ids=()), rows, None), Steps()
        build_trainer(config, data, [steps]).train()
        return [report.loss for report in steps.reports] + [report.grad_norm for report in steps.reports]


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Suppress log messages below ERROR within the block."""
    logger = get_logger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
