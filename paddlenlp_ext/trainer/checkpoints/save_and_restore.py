"""Save and restore checkpoints: weights or adapter, tokenizer, optimizer state, progress and configuration.

checkpoint-100/
    model.safetensors or adapter_model.safetensors, their config, tokenizer files
    training_state.*      optimizer state, and the training state of the adapter method and the objective
    trainer_state.json    training progress: step, data position, log history
    run_config.json       flat configuration
    manifest.json         size and SHA-256 sum of every other file
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.checksum_manifest import write_manifest
from paddlenlp_ext.checkpoint.training_state import load_training_state, save_training_state
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.checkpoints.output_dir import STATE_FILE
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.optimizers.optimizer_state import Optimizer, optimizer_state, restore_optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import updated_parameters
from paddlenlp_ext.trainer.single_process import ProcessGroup
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.files import atomic_folder, read_json_object, write_json
from paddlenlp_ext.utils.locks import check_no_active_run
from paddlenlp_ext.utils.storage_errors import explained_errors

# Prefixes of tensor names in the training state: one for the model's hooks, one for the objective.
_HOOKS, _OBJECTIVE = "hooks/", "objective/"
# Prefix of the model's tensor names while tensors are gathered. Tensor names in the weight files have no prefix.
_WEIGHTS = "weights/"
HAS_MANIFEST = "has_manifest"
"""Key of training_state.json. Checkpoints of earlier versions have neither the key nor a manifest."""


def write_checkpoint(
    folder: Path,
    model: TrainableModel,
    tokenizer: Any,
    optimizer: Optimizer,
    objective: Objective,
    state: TrainerState,
    config: RunConfig,
    process_group: ProcessGroup,
) -> Callable[[], None]:
    """Write a checkpoint to a hidden folder, and return the function that completes the checkpoint.

    Returns:
        Function that hashes and flushes the files and renames the folder on the main process. Any thread may call the
        function, so that slow hashing can run in the background.

    Raises:
        StorageError: the disk is full or read-only, or a permission is missing; earlier checkpoints are unchanged. The
            returned function raises StorageError too.
    """
    step = state.step
    tensors = {f"{_WEIGHTS}{name}": tensor for name, tensor in model.tensors_to_save().items()}
    tensors |= optimizer_state(optimizer, updated_parameters(model))
    tensors |= {f"{_HOOKS}{name}": tensor for name, tensor in model.hooks.training_state().items()}
    tensors |= {f"{_OBJECTIVE}{name}": tensor for name, tensor in objective.training_state().items()}

    def write(full: Mapping[str, Any]) -> None:
        model.save_pretrained(str(draft), tensors=_weights_of(full))
        _save_tokenizer(draft, tokenizer)
        others = {name: tensor for name, tensor in full.items() if not name.startswith(_WEIGHTS)}
        save_training_state(draft, others, {"step": step, HAS_MANIFEST: True})
        write_json(draft / "run_config.json", config.to_flat_dict())
        write_json(draft / STATE_FILE, state.to_dict())

    with ExitStack() as stack:
        draft = stack.enter_context(atomic_folder(folder)) if process_group.is_main else folder
        process_group.save_gathered(tensors, write)
        written = stack.pop_all()

    def complete() -> None:
        with written:
            if process_group.is_main:
                write_manifest(draft, step)

    return complete


def save_finished(folder: Path, model: TrainableModel, tokenizer: Any, process_group: ProcessGroup) -> None:
    """Write the final weights or adapter of a finished run, and the tokenizer.

    Raises:
        ValueError: another run writes to the folder.
        StorageError: the disk is full or read-only, or a permission is missing.
    """

    def write(full: Mapping[str, Any]) -> None:
        check_no_active_run(folder)
        with explained_errors(folder):
            model.save_finished(str(folder), tensors=full)
            _save_tokenizer(folder, tokenizer)

    process_group.save_gathered(model.tensors_to_save(), write)


def _weights_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(_WEIGHTS)}


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def read_state(folder: Path) -> TrainerState:
    """Read the training progress stored in a checkpoint.

    Raises:
        ValueError: trainer_state.json is missing or damaged, or was written by an incompatible version.
    """
    stored = read_json_object(folder / STATE_FILE)
    try:
        return TrainerState.from_dict(stored)
    except ValueError as error:
        raise ValueError(f"{folder / STATE_FILE}: {error}") from error


def restore_checkpoint(
    folder: Path, model: TrainableModel, optimizer: Optimizer, objective: Objective, process_group: ProcessGroup
) -> None:
    """Restore weights, optimizer state, and the training state of the model and the objective bit for bit.

    The parallel layout of this run may differ from the layout of the run that wrote the checkpoint.

    Raises:
        ValueError: the checkpoint's weights, optimizer state or objective do not fit this run.
    """
    model.load_weights(str(folder))
    tensors, _ = load_training_state(folder)
    saved = tensors.mapped()
    hooks, objective_state = (
        {name.removeprefix(prefix): np.array(saved.pop(name)) for name in list(saved) if name.startswith(prefix)}
        for prefix in (_HOOKS, _OBJECTIVE)
    )
    restore_optimizer_state(optimizer, updated_parameters(model), saved, process_group.union)
    model.hooks.restore_training_state(hooks)
    objective.restore_training_state(objective_state)
