"""Choose the objective of a run from the sections of its configuration."""

from __future__ import annotations

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.forward_backward import ForwardBackward
from paddlenlp_ext.trainer.objectives.dpo_objective import PreferenceObjective
from paddlenlp_ext.trainer.objectives.grpo_objective import GRPOObjective
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.reward_objective import RewardObjective
from paddlenlp_ext.trainer.objectives.sft_objective import CrossEntropy
from paddlenlp_ext.trainer.single_process import ProcessGroup


def build_objective(
    config: RunConfig, model: TrainableModel, forward_backward: ForwardBackward, process_group: ProcessGroup
) -> Objective:
    """Return the objective of GRPO, of a reward model, of preference training or of supervised fine-tuning."""
    if config.grpo is not None:
        return GRPOObjective(config, model, forward_backward, process_group)
    if config.reward is not None:
        return RewardObjective(config, model)
    if config.preference is not None:
        return PreferenceObjective(config, model, forward_backward, process_group)
    return CrossEntropy(config, model.config.max_context)
