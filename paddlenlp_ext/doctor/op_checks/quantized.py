"""Test cases of the ops on quantized weights."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.doctor.op_checks.case import Inputs, op_case
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.int8_linear import int8_input_gradient_op, int8_linear
from paddlenlp_ext.ops.quantized_grouped_linear import quantized_grouped_input_gradient_op, quantized_grouped_linear
from paddlenlp_ext.ops.quantized_linear import quantized_input_gradient_op, quantized_linear
from paddlenlp_ext.ops.quantized_weight import QuantizedStack, QuantizedWeight, stack_weights
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize

OUTPUTS, WIDTH = 64, 128
NF4 = QuantizationConfig(algo="nf4", double_quant=True)
FOUR_BIT = (NF4, QuantizationConfig(algo="fp4"))
INTEGER = (
    QuantizationConfig(algo="weight_only_int8"),
    QuantizationConfig(algo="weight_only_int4"),
    QuantizationConfig(algo="weight_only_int4", group_size=64),
)
STARTS = np.array([0, 3, 3, 7, 10], np.int64)
"""First row of each of four groups, and the end of the last group; the second group is empty."""


def _weight(inputs: Inputs, options: QuantizationConfig) -> QuantizedWeight:
    return quantize(inputs.array(OUTPUTS, WIDTH), options)


def _stack(inputs: Inputs) -> QuantizedStack:
    return stack_weights([[_weight(inputs, NF4) for _ in range(2)] for _ in range(4)])


@op_case("dequantize", gpu_dtypes=("float32",))
def run_dequantize(inputs: Inputs) -> list[paddle.Tensor]:
    """Dequantize a weight of each format."""
    return [dequantize(_weight(inputs, options)) for options in (*FOUR_BIT, *INTEGER)]


@op_case("quantized linear (nf4, fp4)")
def run_four_bit_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call linear with 4-bit weights on many rows, few rows and one row."""
    return [
        quantized_linear(inputs.trained(rows, WIDTH), _weight(inputs, each)) for each in FOUR_BIT for rows in (21, 5, 1)
    ]


@op_case("quantized linear (int8, int4)")
def run_integer_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call linear with int8 and int4 weights."""
    return [quantized_linear(inputs.trained(21, WIDTH), _weight(inputs, each)) for each in INTEGER]


@op_case("quantized linear's gradient")
def run_input_gradient(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute the input gradient of linear layers with quantized weights."""
    gradient = inputs.frozen(21, OUTPUTS)
    return [quantized_input_gradient_op.choose(gradient)(gradient, _weight(inputs, each)) for each in (NF4, *INTEGER)]


@op_case("int8 linear")
def run_int8_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the int8 linear layer with nf4, int8 and int4 weights."""
    return [int8_linear(inputs.trained(21, WIDTH), _weight(inputs, each)) for each in (NF4, *INTEGER)]


@op_case("int8 linear's gradient")
def run_int8_input_gradient(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute the input gradient of the int8 linear layer."""
    gradient = inputs.frozen(21, OUTPUTS)
    return [int8_input_gradient_op.choose(gradient)(gradient, _weight(inputs, each)) for each in (NF4, *INTEGER)]


@op_case("quantized grouped linear")
def run_grouped_linear(inputs: Inputs) -> list[paddle.Tensor]:
    """Call the grouped linear layer of experts with quantized weights."""
    return [*quantized_grouped_linear(inputs.trained(10, WIDTH), _stack(inputs), STARTS)]


@op_case("quantized grouped linear's gradient")
def run_grouped_input_gradient(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute the input gradient of the grouped linear layer with quantized weights."""
    gradients = [inputs.frozen(10, OUTPUTS) for _ in range(2)]
    return [quantized_grouped_input_gradient_op.choose(gradients[0])(gradients, _stack(inputs), STARTS)]
