"""Training block of a feed-forward against its formula in float64, with all parameters trained."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.training_blocks import AdaptedLinear, BlockNorm, feed_forward_block
from tests.common.marks import needs_cpp

pytestmark = needs_cpp
ROWS, HIDDEN, WIDTH, EPSILON = 301, 19, 37, 1e-5
SHAPES = {
    "x": [ROWS, HIDDEN],
    "norm": [HIDDEN],
    "gate": [WIDTH, HIDDEN],
    "gate_bias": [WIDTH],
    "up": [WIDTH, HIDDEN],
    "up_bias": [WIDTH],
    "down": [HIDDEN, WIDTH],
    "down_bias": [HIDDEN],
}
DRAW = np.random.default_rng(3)
VALUES = {name: DRAW.normal(0, 0.5, shape) for name, shape in SHAPES.items()}
Y_GRADIENT = DRAW.normal(size=[ROWS, HIDDEN])


def formula() -> dict[str, np.ndarray]:
    """Return the output y and the gradients of all inputs."""
    x, norm, down = VALUES["x"], VALUES["norm"], VALUES["down"]
    inverse = 1 / np.sqrt((x**2).mean(1, keepdims=True) + EPSILON)
    n = x * inverse * norm
    gate, up = (n @ VALUES[name].T + VALUES[f"{name}_bias"] for name in ("gate", "up"))
    s = 1 / (1 + np.exp(-gate))
    h = gate * s * up
    dh = Y_GRADIENT @ down
    d_gate, d_up = dh * up * s * (1 + gate * (1 - s)), dh * gate * s
    dn = d_gate @ VALUES["gate"] + d_up @ VALUES["up"]
    through_norm = (dn * norm - x * inverse**2 * (dn * norm * x).mean(1, keepdims=True)) * inverse
    return {
        "y": x + h @ down.T + VALUES["down_bias"],
        "x": Y_GRADIENT + through_norm,
        "norm": (dn * x * inverse).sum(0),
        "gate": d_gate.T @ n,
        "gate_bias": d_gate.sum(0),
        "up": d_up.T @ n,
        "up_bias": d_up.sum(0),
        "down": Y_GRADIENT.T @ h,
        "down_bias": Y_GRADIENT.sum(0),
    }


def test_feed_forward_block_with_trained_weights_follows_the_formula():
    tensors = {name: paddle.to_tensor(value.astype("float32"), stop_gradient=False) for name, value in VALUES.items()}
    linears = {name: AdaptedLinear(tensors[name], tensors[f"{name}_bias"]) for name in ("gate", "up", "down")}
    norm = BlockNorm(tensors["norm"], EPSILON)
    y = feed_forward_block(tensors["x"].reshape([7, 43, HIDDEN]), norm, linears, is_gelu=False).flatten(0, 1)
    y.backward(paddle.to_tensor(Y_GRADIENT.astype("float32")))
    found = {"y": y.numpy(), **{name: each.grad.numpy() for name, each in tensors.items()}}
    for name, expected in formula().items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=2e-6 * abs(expected).max(), err_msg=name)


def test_feed_forward_block_with_a_trained_weight_of_two_layers_is_an_error():
    """The C++ library would write the gradients of both layers to one buffer."""
    tensors = {name: paddle.to_tensor(value.astype("float32"), stop_gradient=False) for name, value in VALUES.items()}
    linears = {"gate": "gate", "up": "gate", "down": "down"}
    linears = {name: AdaptedLinear(tensors[weight], None) for name, weight in linears.items()}
    with pytest.raises(AssertionError, match="layers of a block share a trained tensor"):
        feed_forward_block(tensors["x"].unsqueeze(0), BlockNorm(tensors["norm"], EPSILON), linears, is_gelu=False)
