"""Options of post-training quantization, and quantization of one matrix with the chosen method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.quantization.ptq.awq import output_error, search_clipping
from paddlenlp_ext.quantization.ptq.gptq import InverseFactor, gptq
from paddlenlp_ext.quantization.ptq.input_statistics import InputStatistics
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.rtn import round_to_nearest


@dataclass(frozen=True, kw_only=True)
class PostTrainingOptions:
    """Method and format of a post-training quantization.

    Attributes:
        method: rtn (round to nearest), gptq or awq.
        integers: format of the weights.
        act_order: whether GPTQ rounds the columns with the largest inputs first.
        damping: GPTQ adds the mean of the Hessian's diagonal, times `damping`, to the diagonal.
        clips: whether AWQ searches a clipping factor for each group's range.
        skipped: patterns of linear layers that stay in full precision.
    """

    method: str
    integers: IntegerFormat
    act_order: bool = False
    damping: float = 0.01
    clips: bool = True
    skipped: tuple[str, ...] = ()

    @property
    def needs_rows(self) -> bool:
        """True if the method needs calibration rows."""
        return self.method != "rtn"


@contextmanager
def prefix_errors(layer: str) -> Iterator[None]:
    """Context manager: prefix the message of a `ValueError` with the name of a layer."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from error


class ErrorTotals:
    """Relative squared output errors of all matrices, for the chosen method and for rounding to nearest."""

    def __init__(self) -> None:
        self.errors: list[tuple[float, float]] = []

    def add(
        self, weight_OI: np.ndarray, quantized_OI: np.ndarray, hessian_II: np.ndarray, options: IntegerFormat
    ) -> None:
        """Add the errors of a matrix [O, I]; `hessian_II` is the mean of x^T x."""
        outputs = output_error(weight_OI, hessian_II)
        if outputs > 0:
            nearest = round_to_nearest(weight_OI, options).dequantized()
            found = output_error(quantized_OI - weight_OI, hessian_II)
            self.errors.append((found / outputs, output_error(nearest - weight_OI, hessian_II) / outputs))

    def describe(self) -> str:
        """Describe the mean relative errors."""
        found, nearest = np.mean(self.errors, axis=0)
        return f"mean relative squared error of the layers' outputs: {found:.3g}; rounding to nearest: {nearest:.3g}"


def quantize_matrix(
    name: str, weight_OI: np.ndarray, inputs: InputStatistics | None, options: PostTrainingOptions, errors: ErrorTotals
) -> QuantizedWeight:
    """Quantize a matrix with the method of the options; without input statistics, round to nearest.

    Args:
        name: name of the layer, for error messages.
        weight_OI: the weight, float32.
        inputs: statistics of the inputs; None if no inputs were recorded.
        options: method and format.
        errors: totals to which the output error of the matrix is added.

    Raises:
        ValueError: the weight does not fit the format (`IntegerFormat`), an input is not finite, or (GPTQ) the second
            moments of the inputs are not positive definite.
    """
    integers = options.integers
    with prefix_errors(name):
        if inputs is None or inputs.rows == 0 or options.method == "rtn":
            return round_to_nearest(weight_OI, integers).packed(integers)
        hessian_II = inputs.hessian
        if options.method == "gptq":
            factor = inputs.derived(lambda: InverseFactor.from_hessian(hessian_II, options.act_order, options.damping))
            rounded = gptq(weight_OI, factor, integers)
        else:
            shrink_OG = search_clipping(weight_OI, hessian_II, integers) if options.clips else 1.0
            rounded = round_to_nearest(weight_OI, integers, shrink_OG)
    errors.add(weight_OI, rounded.dequantized(), hessian_II, integers)
    return rounded.packed(integers)
