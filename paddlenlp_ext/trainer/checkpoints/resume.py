"""Resume a run from an undamaged checkpoint that fits its configuration, or load the best checkpoint at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.checksum_manifest import MANIFEST_FILE, find_damage
from paddlenlp_ext.checkpoint.training_state import load_training_state
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.dataclass_options import Option, options_of
from paddlenlp_ext.config.run_config import method_options
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.data.sampler import check_same_data_order
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.checkpoints.output_dir import AUTO, checkpoint_folder, resume_candidates
from paddlenlp_ext.trainer.checkpoints.save_and_restore import HAS_MANIFEST, read_state
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.stability.loss_scale import LossScale
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.files import read_json_object
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)

_OBJECTIVE_SECTIONS = ("distillation", "preference", "reward", "grpo", "rewards")
_NOT_OBJECTIVE = ("steps_per_generation", "num_generations_eval", "sampling_batch_size", "reward_time_limit")
"""Keys of these sections that do not affect the loss; `steps_per_generation` is compared in the data order."""
_REPORTED_SECTIONS = ("optim", "precision")
_WITHOUT_EFFECT = ("device", "scale_loss")  # a run may resume on another device, and restores the loss scale
_MAX_PROBLEMS = 5


def begin_or_resume(
    config: RunConfig, data_order: dict[str, Any], total_steps: int, best_name: str
) -> tuple[Path | None, TrainerState]:
    """Return the checkpoint to resume from and its training state; for a new run, None and a new state.

    Args:
        config: the run's configuration.
        data_order: settings that determine the order of the run's data.
        total_steps: optimizer steps of the run.
        best_name: metric that selects the run's best evaluation.

    Raises:
        ValueError: the checkpoint does not exist, is damaged, or does not fit the configuration.
    """
    assert config.train.output_dir is not None, "check_output_dir requires output_dir"
    checkpoint = choose_checkpoint(config.train.output_dir, config.train.resume_from_checkpoint)
    state = TrainerState(evaluation_due=config.train.eval_on_start)
    if checkpoint is not None:
        state = read_state(checkpoint)
        logger.info("resuming from %s: step %d of %d", checkpoint, state.step, total_steps)
        if config.train.ignore_data_skip:
            state.batch_index, state.data_cursor = 0, None
        else:
            check_same_data_order(state.data_order, data_order)
        _check_same_objective(checkpoint, config)
        _report_changes(checkpoint, config)
        _check_best(checkpoint, state, config, best_name)
        if state.total_steps != total_steps:
            logger.warning(
                "the run was planned for %d steps and now has %d steps; the learning rate schedule uses the new count",
                state.total_steps,
                total_steps,
            )
    state.total_steps, state.data_order = total_steps, data_order
    _continue_loss_scale(state, config)
    return checkpoint, state


def _continue_loss_scale(state: TrainerState, config: RunConfig) -> None:
    """With float16, continue with the checkpoint's loss scale, or start with `scale_loss` in a new run."""
    if not config.precision.scales_loss:
        state.loss_scale = None
    elif state.loss_scale is None:
        state.loss_scale = LossScale(config.precision.scale_loss)
    else:
        logger.info("loss scale %g, from the checkpoint", state.loss_scale.scale)


def choose_checkpoint(output_dir: str | Path, resume: bool | str | None) -> Path | None:
    """Return the checkpoint that `resume` names, or the newest undamaged checkpoint; return None for a new run.

    Args:
        output_dir: the run's folder.
        resume: `resume_from_checkpoint`.

    Raises:
        ValueError: the named checkpoint or every checkpoint is damaged (the message names the files), or
            `resume_candidates` raises a ValueError.
    """
    is_named = isinstance(resume, str) and resume != AUTO
    damaged = []
    for folder in resume_candidates(output_dir, resume):
        problems = checkpoint_damage(folder)
        if not problems:
            return folder
        damaged.append(f"{folder}: {'; '.join(problems[:_MAX_PROBLEMS])}{'; ...' * (len(problems) > _MAX_PROBLEMS)}")
        if not is_named:
            logger.warning("damaged checkpoint %s. Trying the previous checkpoint", damaged[-1])
    if is_named and damaged:
        raise ValueError(
            f"damaged checkpoint {damaged[0]}. Resume from another checkpoint; resume_from_checkpoint: true selects "
            "the newest undamaged checkpoint"
        )
    if damaged:
        raise ValueError(
            f"all checkpoints in {output_dir} are damaged: {' | '.join(damaged)}. Restore a checkpoint from a backup, "
            "or remove all of them to start a new run"
        )
    return None


def load_best_checkpoint(
    output_dir: Path, state: TrainerState, model: TrainableModel, process_group: ProcessGroup
) -> bool:
    """Load the weights of the checkpoint with the best evaluation (`load_best_model_at_end`).

    Returns:
        Whether the weights changed. The final weights are kept if they are the best, if the run had no evaluation, or
        if the checkpoint is damaged.
    """
    if state.best_step is None:
        logger.warning("load_best_model_at_end: the run had no evaluation; keeping the final weights")
        return False
    if state.best_step == state.step:
        return False
    folder = checkpoint_folder(output_dir, state.best_step)
    problems = process_group.from_main(checkpoint_damage(folder) if process_group.is_main else None)
    if problems:
        logger.warning(
            "load_best_model_at_end: %s is damaged (%s); keeping the final weights", folder, "; ".join(problems)
        )
        return False
    model.load_weights(str(folder))
    logger.info("best model: step %d, %s %.4f", state.best_step, state.best_name, state.best_metric)
    return True


def checkpoint_damage(folder: Path) -> list[str]:
    """Describe the damaged, missing and inconsistent files of a checkpoint; return [] for an undamaged checkpoint.

    Without a manifest (checkpoints of earlier versions), only headers and steps are checked, and a warning is logged.
    """
    if (folder / MANIFEST_FILE).exists():
        return find_damage(folder)
    try:
        state = read_state(folder)
        _, values = load_training_state(folder)
    except ValueError as error:
        return [str(error).replace(f"{folder}/", "")]
    if values.get(HAS_MANIFEST):
        return [f"{MANIFEST_FILE}: missing"]
    if values.get("step", state.step) != state.step:
        return [f"training_state.json is from step {values['step']}, trainer_state.json from step {state.step}"]
    logger.warning(
        "the checkpoint %s has no %s, because an earlier version of paddlenlp_ext wrote it; its files are not verified",
        folder,
        MANIFEST_FILE,
    )
    return []


def _check_same_objective(checkpoint: Path, config: RunConfig) -> None:
    """Check that the options of the loss, of the reward model or of GRPO have the values of the checkpoint.

    Raises:
        ValueError: an option has changed; the message gives the old and the new value.
    """
    options = [
        option
        for name in _OBJECTIVE_SECTIONS
        if name in config.sections
        for option in options_of(type(config.sections[name]), name)
        if option.key not in _NOT_OBJECTIVE
    ]
    if changes := _changes(checkpoint, config, options):
        raise ValueError(
            f"{checkpoint} was trained with a different objective: {'; '.join(changes)}. Restore the old values, or "
            "start a new run from the checkpoint's weights"
        )


def _report_changes(checkpoint: Path, config: RunConfig) -> None:
    """Log a warning with the changed options of the optimizer, the precision and the adapter method."""
    options = [o for name in _REPORTED_SECTIONS for o in options_of(type(config.sections[name]), name)]
    if config.peft is not None and config.peft_switch is not None:
        options += method_options(config.peft_switch, type(config.peft))
    if changes := _changes(checkpoint, config, [o for o in options if o.key not in _WITHOUT_EFFECT]):
        logger.warning(
            "the configuration has changed since %s: %s. The run continues with the new values",
            checkpoint.name,
            "; ".join(changes),
        )


def _changes(checkpoint: Path, config: RunConfig, options: list[Option]) -> list[str]:
    """Describe the options whose values differ from the checkpoint; ignore options that the checkpoint lacks.

    Options of distillation are not ignored: a run that does not distill does not write them (`to_flat_dict`).
    """
    unwritten = {option.key: option.default for option in options_of(DistillationConfig, "distillation")}
    saved = unwritten | read_json_object(checkpoint / "run_config.json")
    current = unwritten | json.loads(json.dumps(config.to_flat_dict()))
    return [
        f"{option.key} was {json.dumps(saved[option.key])}, now {json.dumps(current[option.key])}"
        for option in options
        if option.key in saved and saved[option.key] != current[option.key]
    ]


def _check_best(checkpoint: Path, state: TrainerState, config: RunConfig, best_name: str) -> None:
    """Reset the best evaluation if the metric changed, or the best checkpoint is required but damaged or missing."""
    assert config.train.output_dir is not None
    best = state.best_step
    if best is None:
        return
    folder = checkpoint_folder(config.train.output_dir, best)
    if config.train.load_best_model_at_end and folder.resolve() != checkpoint.resolve():
        problems = checkpoint_damage(folder) if folder.is_dir() else ["missing"]
        if problems:
            logger.warning(
                "the best checkpoint so far (step %d) cannot be used (%s); the best checkpoint is now chosen from "
                "later evaluations",
                best,
                "; ".join(problems),
            )
            state.forget_best()
    if state.best_name not in (None, best_name):
        logger.warning(
            "metric_for_best_model changed from %s to %s; the best checkpoint is now chosen from later evaluations",
            state.best_name,
            best_name,
        )
        state.forget_best()
