"""Return an unstable run to its last stable checkpoint (`nan_policy: rollback`)."""

from __future__ import annotations

from pathlib import Path

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.checkpoints.output_dir import checkpoint_folder, remove_later_checkpoints
from paddlenlp_ext.trainer.checkpoints.resume import checkpoint_damage
from paddlenlp_ext.trainer.checkpoints.save_and_restore import read_state, restore_checkpoint
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.optimizers.optimizer_state import Optimizer
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.train_step import NonFiniteError
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger(__name__)


def roll_back(
    error: NonFiniteError,
    output_dir: Path,
    state: TrainerState,
    model: TrainableModel,
    optimizer: Optimizer,
    objective: Objective,
    process_group: ProcessGroup,
) -> TrainerState:
    """Restore the last stable checkpoint; return its training state.

    In the returned state, the steps from the first unstable step to the failed step are marked as skipped. Checkpoints
    after the last stable checkpoint are removed.

    Args:
        error: error of the failed step, the step after `state.step`.
        output_dir: folder of the checkpoints.
        state: the run's progress.
        model, optimizer, objective: restored in place.
        process_group: processes of the run, which all call this function.

    Raises:
        NonFiniteError: there is no undamaged stable checkpoint.
    """
    steps = range(state.unstable_since, state.step + 2)
    folder = checkpoint_folder(output_dir, state.healthy_step)
    restored = None
    if process_group.is_main and state.healthy_step and folder.is_dir() and not checkpoint_damage(folder):
        restored = read_state(folder)
        restored.total_steps = state.total_steps
        restored.skipped_steps = sorted({*state.skipped_steps, *steps})
        restored.num_nan_steps = state.num_nan_steps
        restored.loss_scale = restored.loss_scale or state.loss_scale
        restored.unstable_since, restored.last_unstable = state.unstable_since, state.last_unstable
    restored = process_group.from_main(restored)
    if restored is None:
        message = (
            f"{error}. There is no undamaged stable checkpoint to return to: lower save_steps, or set nan_policy: skip"
        )
        raise NonFiniteError(error.loss, error.grad_norm, message) from error
    logger.warning(
        "%s. Returning to %s; the data of steps %d to %d are skipped (nan_policy: rollback)",
        *(error, folder, steps[0], steps[-1]),
    )
    restore_checkpoint(folder, model, optimizer, objective, process_group)
    process_group.barrier()
    if process_group.is_main:
        remove_later_checkpoints(output_dir, restored.step, state.step)
    return restored
