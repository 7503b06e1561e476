"""Weight initialization. Random weights depend on the seed and the parameter name, not on the creation order."""

from __future__ import annotations

import zlib

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.sharding_spec import is_on_stage


def initialize_weights(model: nn.Layer, seed: int, standard_deviation: float) -> None:
    """Draw all parameters with at least two axes, including the biases of experts, from normal(0, standard_deviation).

    Other biases stay 0, and norm scales stay 1.
    """
    for name, parameter in model.named_parameters():
        if len(parameter.shape) >= 2 and is_on_stage(parameter):
            values = random_weight(name, tuple(parameter.shape), seed, standard_deviation)
            parameter.set_value(paddle.to_tensor(values).astype(parameter.dtype))


def random_weight(name: str, shape: tuple[int, ...], seed: int, standard_deviation: float) -> np.ndarray:
    """Return the initial values of the parameter `name`, fp32."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(standard_deviation)
