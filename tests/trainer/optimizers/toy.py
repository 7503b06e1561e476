"""Toy model with named parameters, and options of an optimizer over it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters

BETA1, BETA2, EPSILON, DECAY, RATE = 0.9, 0.99, 1e-8, 0.1, 1e-2
HEAD_DIM = 4


class Toy(TrainableModel):
    """Model with the given parameters; those named lora_B have four times the learning rate."""

    def __init__(self, parameters: dict[str, list[int]], dtype: str = "float32", seed: int = 0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        self.config = SimpleNamespace(head_dim=HEAD_DIM)
        for name, shape in parameters.items():
            parameter = self.create_parameter(shape, dtype="float32")
            parameter.set_value(generator.standard_normal(shape).astype("float32"))
            self.add_parameter(name.replace(".", "/"), parameter)
        self.to(dtype=dtype)

    def named_parameters(self, *args, **kwargs):
        return [(name.replace("/", "."), parameter) for name, parameter in super().named_parameters(*args, **kwargs)]

    def learning_rate_scale(self, name: str) -> float:
        return 4.0 if name.endswith("lora_B") else 1.0


def options(optim: str, **changes):
    values = {
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "adam_beta1": BETA1,
        "adam_beta2": BETA2,
        "adam_epsilon": EPSILON,
        "muon_momentum": 0.95,
        "muon_scale": "match_rms_adamw",
    }
    return SimpleNamespace(optim=optim, **{**values, **changes})


def set_random_gradients(model: Toy, generator: np.random.Generator) -> dict[str, np.ndarray]:
    gradients = {}
    for name, parameter in trainable_parameters(model).items():
        gradients[name] = generator.standard_normal(parameter.shape).astype("float32")
        parameter.grad = paddle.to_tensor(gradients[name]).astype(parameter.dtype)
    return gradients


def values_of(model: Toy) -> dict[str, np.ndarray]:
    return {name: parameter.astype("float32").numpy().astype("float64") for name, parameter in model.named_parameters()}


def adam_step(value, first, second, step, rate, decays=True):
    """Return AdamW's update for moments that include this step's gradient (arXiv:1711.05101)."""
    value = value * (1 - rate * DECAY) if decays else value
    return value - rate * (first / (1 - BETA1**step)) / (np.sqrt(second / (1 - BETA2**step)) + EPSILON)
