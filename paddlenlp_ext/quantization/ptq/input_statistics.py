"""Statistics of the inputs of linear layers, recorded while a decoder layer runs on calibration data.

Shapes: N rows, I inputs, G groups of rows (experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.grouped_linear import GroupedLinear


class InputStatistics:
    """Second moments and mean magnitudes of a linear layer's inputs.

    Attributes:
        rows: number of input rows.
    """

    def __init__(self, inputs: int) -> None:
        self.rows = 0
        self._moments = paddle.zeros([inputs, inputs])
        self._magnitudes = paddle.zeros([1, inputs])
        self._derived: Any = None

    @paddle.no_grad()
    def add(self, x_NI: paddle.Tensor) -> None:
        """Add the inputs x [N, I] of a batch."""
        x_NI = x_NI.detach().astype("float32")
        self._moments.add_(paddle.matmul(x_NI, x_NI, transpose_x=True))
        # On the CPU, a matmul is more accurate than Paddle's sum along an axis.
        self._magnitudes.add_(paddle.matmul(paddle.ones([1, len(x_NI)]), x_NI.abs()))
        self.rows += len(x_NI)

    @property
    def hessian(self) -> np.ndarray:
        """Return the second moments of the inputs, the mean of x^T x, float32 [I, I].

        Raises:
            ValueError: an input is not finite.
        """
        mean = self._moments.numpy() / np.float32(max(self.rows, 1))
        if not np.isfinite(mean).all():
            raise ValueError("inputs from the calibration rows are not finite; check the model and the rows")
        return mean

    @property
    def magnitudes(self) -> np.ndarray:
        """Return the mean magnitudes of the inputs, the mean of |x|, float32 [I]."""
        return self._magnitudes.numpy()[0] / np.float32(max(self.rows, 1))

    def derived(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once for all layers that share these statistics."""
        if self._derived is None:
            self._derived = make()
        return self._derived

    def divided(self, scales_I: np.ndarray) -> InputStatistics:
        """Return the statistics of these inputs after division by positive scales [I]."""
        result, scale = InputStatistics(len(scales_I)), paddle.to_tensor(scales_I)
        result.rows = self.rows
        result._moments = self._moments / scale / scale.unsqueeze(1)
        result._magnitudes = self._magnitudes / scale
        return result


@contextmanager
def record_inputs(layers: Mapping[str, nn.Layer]) -> Iterator[dict[str, InputStatistics]]:
    """Context manager: record the inputs of linear layers; layers with the same input tensor share statistics."""
    statistics: dict[str, InputStatistics] = {}
    last: list[Any] = [None, ""]

    def hook(name: str, layer: Any, arguments: tuple) -> None:
        (x,) = arguments
        if last[0] is x:
            statistics[name] = statistics[last[1]]
            return
        if name not in statistics:
            statistics[name] = InputStatistics(layer.in_features)
        statistics[name].add(x.reshape([-1, x.shape[-1]]))
        last[:] = x, name

    hooks = [
        layer.register_forward_pre_hook(lambda layer, arguments, name=name: hook(name, layer, arguments))
        for name, layer in layers.items()
    ]
    try:
        yield statistics
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def record_expert_inputs(layer: GroupedLinear, first: int, end: int) -> Iterator[list[InputStatistics]]:
    """Context manager: record the inputs of the experts from `first` to `end` (exclusive)."""
    statistics = [InputStatistics(layer.weight_shape[2]) for _ in range(first, end)]

    def hook(layer: GroupedLinear, arguments: tuple) -> None:
        x_NI, starts = arguments
        for expert in range(first, end):
            if starts[expert] < starts[expert + 1]:
                statistics[expert - first].add(x_NI[int(starts[expert]) : int(starts[expert + 1])])

    registered = layer.register_forward_pre_hook(hook)
    try:
        yield statistics
    finally:
        registered.remove()
