"""Choose the objective of a run from the sections of its configuration."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.config import RunConfig
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
) -> Objective:
    """Return the objective of GRPO, a reward model, preference training, distillation or supervised fine-tuning."""
    if config.grpo is not None:
        return GRPOObjective(config, model, forward_backward, process_group)
    if config.reward is not None:
        return RewardObjective(config, model)
    if config.preference is not None:
        return PreferenceObjective(config, model, forward_backward, process_group)
    if config.distills:
        return DistillationObjective(config, model, process_group, tokenizer)
    return CrossEntropy(config, model.config.max_context)
