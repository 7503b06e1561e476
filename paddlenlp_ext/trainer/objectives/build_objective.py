"""Choose the objective of a run from the sections of its configuration."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.forward_backward import ForwardBackward
from paddlenlp_ext.trainer.objectives.distillation_objective import DistillationObjective
from paddlenlp_ext.trainer.objectives.dpo_objective import PreferenceObjective
from paddlenlp_ext.trainer.objectives.grpo_objective import GRPOObjective
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.reward_objective import RewardObjective
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.single_process import ProcessGroup


def build_objective(
    config: RunConfig,
    model: TrainableModel,
    forward_backward: ForwardBackward,
    process_group: ProcessGroup,
    tokenizer: Any,
    source: ModelSource | None = None,
) -> Objective:
    """Return the objective of GRPO, a reward model, preference training, distillation or supervised fine-tuning.

    Args:
        config: the run's configuration.
        model: the model before training.
        forward_backward: schedule of the model's forward passes.
        process_group: processes of the run.
        tokenizer: tokenizer of the run.
        source: files of the base model; None: the model was in memory.
    """
    if config.grpo is not None:
        return GRPOObjective(config, model, forward_backward, process_group)
    if config.reward is not None:
        return RewardObjective(config, model)
    if config.preference is not None:
        return PreferenceObjective(config, model, forward_backward, process_group)
    if config.distills:
        return DistillationObjective(config, model, process_group, tokenizer, source=source)
    return CrossEntropy(config, model.config.max_context)
