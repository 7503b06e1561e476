"""Test cases for op checks (functions that call an op with reproducible inputs), and error limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.doctor.devices_and_dtypes import Target, paddle_dtype
from paddlenlp_ext.utils.registry import Registry

ALL_DTYPES = ("float32", "bfloat16", "float16")


class Inputs:
    """Random inputs of a test case on the current device, with equal values on every device.

    Args:
        dtype: dtype of the tensors.
        rounded_to: dtype to which values are rounded, so that runs in different dtypes have equal inputs.
    """

    def __init__(self, dtype: str, rounded_to: str) -> None:
        self.dtype, self._rounded_to = paddle_dtype(dtype), paddle_dtype(rounded_to)
        self._generator = np.random.default_rng(0)
        self._trained: list[paddle.Tensor] = []

    def array(self, *shape: int) -> np.ndarray:
        """Return a float32 array of normally distributed values."""
        return self._generator.standard_normal(shape).astype(np.float32)

    def frozen(self, *shape: int, dtype: str | None = None) -> paddle.Tensor:
        """Return a tensor of normally distributed values without a gradient; `dtype` defaults to `self.dtype`."""
        rounded = paddle.to_tensor(self.array(*shape)).astype(self._rounded_to).astype("float32")
        return rounded.astype(self.dtype if dtype is None else paddle_dtype(dtype))

    def trained(self, *shape: int) -> paddle.Tensor:
        """Return a trainable tensor of normally distributed values; the method `gradients` returns its gradient."""
        tensor = self.frozen(*shape)
        tensor.stop_gradient = False
        self._trained.append(tensor)
        return tensor

    def gradients(self, outputs: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        """Run a backward pass with random output gradients; return the gradients of the tensors from `trained`."""
        terms = [
            (output.astype("float32") * paddle.to_tensor(self.array(*output.shape))).sum()
            for output in outputs
            if not output.stop_gradient
        ]
        if terms:
            paddle.add_n(terms).backward()
        return [tensor.grad for tensor in self._trained if tensor.grad is not None]


@dataclass(frozen=True)
class OpCase:
    """Test case of an op.

    Attributes:
        run: function that creates inputs, calls the op and returns the outputs, including tensors updated in place.
        gpu_dtypes: dtypes in which the op is tested on GPUs.
        cpu_dtypes: dtypes in which the op is tested on CPUs.
        keeps_dtype: whether the reference runs in the dtype of the target; otherwise it runs in float32.
    """

    run: Callable[[Inputs], Sequence[paddle.Tensor]]
    gpu_dtypes: Sequence[str]
    cpu_dtypes: Sequence[str]
    keeps_dtype: bool

    def dtypes(self, target: Target) -> Sequence[str]:
        """Return the dtypes in which the op is tested on the device of a target."""
        return self.cpu_dtypes if target.device == "cpu" else self.gpu_dtypes


OP_CASES: Registry[OpCase] = Registry("op", "paddlenlp_ext.doctor.op_checks")


def op_case(
    name: str,
    gpu_dtypes: Sequence[str] = ALL_DTYPES,
    cpu_dtypes: Sequence[str] = ("float32",),
    keeps_dtype: bool = False,
) -> Callable[[Callable[[Inputs], Sequence[paddle.Tensor]]], Any]:
    """Return a decorator that registers a test case of the op `name`; see `OpCase` for the other arguments."""

    def enter(run: Callable[[Inputs], Sequence[paddle.Tensor]]) -> Any:
        OP_CASES.register(name)(OpCase(run, gpu_dtypes, cpu_dtypes, keeps_dtype))
        return run

    return enter


def error_limit(target: Target) -> float:
    """Return the largest relative error allowed for an op; larger for float32 on GPUs, where matmuls use TF32."""
    if target.dtype == "float32":
        return 1e-4 if target.device == "cpu" else 5e-3
    return {"bfloat16": 3e-2, "float16": 5e-3}[target.dtype]
