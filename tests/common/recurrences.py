"""Runs of the recurrent ops, and comparisons with their stepwise definitions (tests/ops/<op>/stepwise.py).

Shapes: T positions, R documents, N heads, H key dimension, E value dimension.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.doctor.devices_and_dtypes import paddle_dtype
from paddlenlp_ext.ops.attention import AttentionLayout
from tests.common.marks import backends_of
from tests.ops.gated_delta_rule import stepwise as gated_delta_rule
from tests.ops.kimi_delta_rule import stepwise as kimi_delta_rule
from tests.ops.state_space_duality import stepwise as state_space_duality

DEFINITIONS = {
    "gated delta rule": gated_delta_rule,
    "Kimi delta rule": kimi_delta_rule,
    "state space duality": state_space_duality,
}
"""Name of an op -> module with its definition: `op`, `Inputs`, `random_inputs`, `forward` and `backward`.

The third input has the values [T, N, E], and the last one the initial states [R, N, H, E].
"""
LAYOUTS = {
    "documents of 1": AttentionLayout.from_documents([[1, 1, 1], [1, 1, 1]]),
    "odd lengths": AttentionLayout.from_documents([[61, 3, 1, 89], [100, 54]]),
    "chunk borders": AttentionLayout.from_documents([[64, 65, 128, 190]]),
    "branches": AttentionLayout.from_documents(
        [[70, 5, 1, 66, 3, 130], [9, 80, 7, 64, 64, 51]],
        document_parents=[[None, 0, 0, 0, None, 4], [None, 0, 0, None, 3, 3]],
    ),
}


BACKENDS = [
    pytest.param(definition, *backend.values, marks=backend.marks, id=f"{name}, {backend.values[0]}")
    for name, definition in DEFINITIONS.items()
    for backend in backends_of(definition.op)
]
"""Definition and name of each backend of each op, as parameters of a test."""


def run(
    definition: ModuleType, backend: str, inputs: Any, layout: AttentionLayout, of_outputs: Any, **dtypes: str
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return the outputs, the final states and the gradients of a backend; `dtypes` names the dtypes of inputs."""
    tensors = {
        name: paddle.to_tensor(x, paddle_dtype(dtypes.get(name, "float32")), stop_gradient=False)
        for name, x in inputs.__dict__.items()
    }
    *before, initial = tensors.values()
    outputs = definition.op.choose(before[2], backend)(*before, layout, initial)
    gradients = [paddle.to_tensor(of_x, x.dtype) for of_x, x in zip(of_outputs, outputs, strict=True)]
    paddle.autograd.backward([*outputs], gradients)
    o, final = map(_numpy, outputs)
    return o, final, definition.Inputs(*(_numpy(x.grad) for x in tensors.values()))


def _numpy(x: Any) -> np.ndarray:
    return x.astype("float32").numpy() if x.dtype == paddle.bfloat16 else x.numpy()


def output_gradients(inputs: Any, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random gradients of the outputs [T, N, E] and of the final states [R, N, H, E]."""
    rng = np.random.default_rng(seed)
    _, _, values, *_, initial = inputs.__dict__.values()
    return rng.normal(0, 1, values.shape), rng.normal(0, 1, initial.shape)


def relative_error(x: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    return np.abs(x - expected).max() / np.abs(expected).max()


def check(
    definition: ModuleType, backend: str, inputs: Any, layout: AttentionLayout, tolerance: float, **dtypes: str
) -> None:
    """Compare the outputs and all gradients with the stepwise definition."""
    of_outputs = output_gradients(inputs)
    *found, gradients = run(definition, backend, inputs, layout, of_outputs, **dtypes)
    expected_outputs = definition.forward(inputs, layout)[:2]
    expected = definition.backward(inputs, layout, *of_outputs)
    errors = dict(zip(("outputs", "final"), map(relative_error, found, expected_outputs), strict=True))
    for name, x in gradients.__dict__.items():
        errors[name] = relative_error(x, getattr(expected, name))
    assert max(errors.values()) < tolerance, errors
