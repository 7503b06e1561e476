"""Build the trainer of a run, with the model on the configured device and mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.devices import choose_device
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.process_group import DistributedProcesses
from paddlenlp_ext.rewards.registry import RewardFunction
from paddlenlp_ext.trainer.added_tokens import with_trained_tokens
from paddlenlp_ext.trainer.build_model import BuiltModel, build_model
from paddlenlp_ext.trainer.forward_backward import build_forward_backward
from paddlenlp_ext.trainer.load_data import RunData
from paddlenlp_ext.trainer.objectives.build_objective import build_objective
from paddlenlp_ext.trainer.objectives.grpo_objective import GRPOObjective
from paddlenlp_ext.trainer.single_process import ProcessGroup, SingleProcess
from paddlenlp_ext.trainer.trainer import Trainer


def build_trainer(
    config: RunConfig,
    data: RunData,
    callbacks: Iterable[Any] = (),
    reward_functions: Mapping[str, RewardFunction] | None = None,
) -> Trainer:
    """Build the model on the configured device and mesh, and the trainer of the run.

    Args:
        config: the run's configuration.
        data: inputs of the run.
        callbacks: see `Trainer`.
        reward_functions: reward functions of GRPO in memory; see `load_rewards`.
    """
    choose_device(config.precision.device)
    config = with_trained_tokens(config, data.source)
    mesh = Mesh.from_config(config.parallel)
    built = build_model(data.source, config, mesh, data.any_rows)
    built.model.add_eos_token_ids({*data.template.stop_token_ids, data.tokenizer.eos_token_id} - {None})
    rows = (data.train_rows, data.eval_rows)
    return build_trainer_of(built, config, *rows, data.tokenizer, mesh, callbacks, reward_functions)


def build_trainer_of(
    built: BuiltModel,
    config: RunConfig,
    train_rows: TrainingRows | None,
    eval_rows: TokenizedDataset | Mapping[str, TokenizedDataset] | None,
    tokenizer: Any,
    mesh: Mesh | None = None,
    callbacks: Iterable[Any] = (),
    reward_functions: Mapping[str, RewardFunction] | None = None,
) -> Trainer:
    """Build the trainer of a model that is ready to train, with the objective that the configuration selects.

    Args:
        built: the distributed model; `BuiltModel(model)` for a model in a single process.
        config: the run's configuration.
        train_rows, eval_rows, tokenizer, callbacks: see `Trainer`.
        mesh: processes of the run; None: a single process.
        reward_functions: see `build_trainer`.
    """
    process_group: ProcessGroup = SingleProcess()
    if mesh is not None and mesh.world.size > 1:
        process_group = DistributedProcesses(mesh, built.sharding, built.experts)
    forward_backward = build_forward_backward(built.model, built.pipeline)
    if reward_functions is None:
        objective = build_objective(config, built.model, forward_backward, process_group, tokenizer, built.source)
    else:
        objective = GRPOObjective(config, built.model, forward_backward, process_group, reward_functions)
    return Trainer(
        built.model,
        config,
        train_rows,
        eval_rows,
        tokenizer,
        callbacks=callbacks,
        process_group=process_group,
        forward_backward=forward_backward,
        objective=objective,
    )
