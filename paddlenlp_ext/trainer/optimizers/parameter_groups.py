"""Trained parameters, grouped by weight decay and learning rate scale.

Weight decay applies to matrices, not to norm weights and biases, as in PaddleNLP. An adapter method can exclude
parameters (`allows_weight_decay`). IA3 excludes its scales, because the neutral value of a scale is 1, not 0.
"""

from __future__ import annotations

from typing import Any

import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.sharding_spec import is_on_stage, is_updated_here


def trainable_parameters(model: TrainableModel) -> dict[str, paddle.Tensor]:
    """Return the trained parameters by structured name; in a pipeline, the trained parameters of this stage."""
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if not parameter.stop_gradient and is_on_stage(parameter)}


def updated_parameters(model: TrainableModel) -> dict[str, paddle.Tensor]:
    """Return the trained parameters that this process updates: with ZeRO, the share of this process; otherwise all."""
    return {name: parameter for name, parameter in trainable_parameters(model).items() if is_updated_here(parameter)}


def parameter_groups(model: TrainableModel, weight_decay: float) -> list[dict[str, Any]]:
    """Group the parameters of `updated_parameters` by weight decay and learning rate scale (the ratio of LoRA+).

    The `learning_rate` of a group multiplies the run's learning rate, as in Paddle's optimizers.
    """
    groups: dict[tuple[bool, float], list[paddle.Tensor]] = {}
    for name, parameter in updated_parameters(model).items():
        key = (_decays(model, name, parameter), float(model.learning_rate_scale(name)))
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0, "learning_rate": scale}
        for (decays, scale), members in groups.items()
    ]


def _decays(model: TrainableModel, name: str, parameter: paddle.Tensor) -> bool:
    return parameter.ndim >= 2 and model.allows_weight_decay(name)
