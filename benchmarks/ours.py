"""Parts of a training run, built by the package from configuration keys, for the benchmarks."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from paddlenlp_ext.config import RunConfig, load_run_config
from paddlenlp_ext.config.run_config import SECTIONS
from paddlenlp_ext.data.collate import PackedBatch, collate
from paddlenlp_ext.data.step_batch import StepBatch
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_model import BuiltModel
from paddlenlp_ext.trainer.forward_backward import build_forward_backward
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer, build_rounding
from paddlenlp_ext.trainer.single_process import ProcessGroup, SingleProcess
from paddlenlp_ext.trainer.train_step import OptimizerStep, StepOptions, autocast
from paddlenlp_ext.trainer.trainer_state import StepReport

MODEL = "smollm2-135m-instruct"
_KEYS_OF_EVERY_RUN = {
    "model_name_or_path": MODEL,
    "dataset_name_or_path": "inflection",
    "output_dir": "checkpoints/benchmarks/run",
    "do_train": "true",
    "learning_rate": "1e-4",
    "device": "cpu",
}


def run_config(keys: Sequence[str], sections: Mapping[str, type] = SECTIONS) -> RunConfig:
    """Parse keys such as `--lora true` into a run configuration; other keys have the defaults of the benchmarks."""
    shared = [word for key, value in _KEYS_OF_EVERY_RUN.items() for word in (f"--{key}", value)]
    return load_run_config([*shared, *keys], peft_methods(), sections)


def not_offered(keys: str) -> str | None:
    """Return the reason why keys are rejected or have no effect; None if the keys are available."""
    words = shlex.split(keys)
    try:
        notes = run_config(words).notes
    except ValueError as error:
        return str(error)
    names = [word.removeprefix("--") for word in words if word.startswith("--")]
    return next((note for note in notes if "no effect" in note and any(name in note for name in names)), None)


def packed_batch(ids: np.ndarray, target_fraction: float) -> PackedBatch:
    """Return documents with ids [documents, length] packed into one row.

    Of the tokens after the first of each document, the fraction `target_fraction` are target tokens.
    """
    chosen = np.random.default_rng(1).random(ids.shape) < target_fraction
    # A document of n tokens takes n - 1 positions. An appended token, which is not a target, makes it `length`.
    tokens = np.concatenate([ids, ids[:, :1]], axis=1).astype(np.int32)
    learns = np.concatenate([chosen, np.zeros_like(chosen[:, :1])], axis=1)
    return collate([[EncodedRow(tokens[row], learns[row], row) for row in range(len(ids))]])


def training_step(
    built: BuiltModel, config: RunConfig, batch: PackedBatch, process_group: ProcessGroup | None = None
) -> Callable[[], StepReport]:
    """Return a function that runs the trainer's optimizer step: forward, backward, clipping, update.

    Each micro-batch of each replica is `batch`.
    """
    model, group = built.model, process_group or SingleProcess()
    model.train()
    rounding = build_rounding(model, config.precision, config.train.seed)
    options = StepOptions(
        seed=config.train.seed,
        max_grad_norm=config.optim.max_grad_norm,
        total_steps=1_000_000,
        rounding=rounding,
        autocast=partial(autocast, config.precision),
    )
    optimizer = build_optimizer(model, config.optim, rounding)
    forward_backward = build_forward_backward(model, built.pipeline)
    step = OptimizerStep(model, optimizer, lambda packs, epoch: batch, group, options, forward_backward)
    num_micro = group.size * config.train.gradient_accumulation_steps
    micro_batches, costs = ([[0]],) * num_micro, (1,) * num_micro
    step_batch = StepBatch(epoch=0, index=0, micro_batches=micro_batches, costs=costs, end_fraction=1.0, is_last=True)
    return lambda: step.run(step_batch, 0, config.optim.learning_rate)
