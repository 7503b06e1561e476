"""Triton kernel of RMS norm and linear layers over few positions; independent of Paddle and PyTorch.

    s = x + addend      y[t, o] = (sum_i s[t, i] w[i] W[o, i]) / rms[t] + bias[o],      rms = sqrt(mean(s^2) + epsilon)

The factor 1 / rms is constant per position and is applied after the matmul. A single pass over x therefore computes
the matmul and the mean square. One launch computes up to three layers with the same input x. Without a norm, w and rms
are 1.

A program computes a few outputs of one layer for all positions. Each warp multiplies a slice of the inputs on tensor
cores, and the program adds the partial sums of its warps in a fixed order. A layer with few outputs thus occupies many
warps, without a second launch to add partial sums. W is the first matmul operand: the 16 rows of a tensor-core
instruction are outputs, and the 8 columns are positions. A single position leaves 7 columns unused, but reading W takes
most of the time.

x + addend is rounded to its dtype and then normalized. Sums are float32. Matmul operands are bfloat16 for bfloat16 x,
and TF32 for float16 x: TF32 has as many mantissa bits as float16, and x w does not overflow. Float32 matmuls do not use
tensor cores. The weight formats are described in ops/triton_utils/weight_tiles.py.

Tested in Triton's interpreter (tests/ops/norm_linear/test_triton.py).

Names: T positions, I inputs, O outputs, w = offset + scale of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes
from paddlenlp_ext.ops.triton_utils.weight_tiles import Format, Layer, load_weights

MOST_LAYERS = 3
"""Maximum number of layers per launch."""


SIZES = TileSizes(
    "norm_linear",
    ("bits", "element_size", "positions"),
    lambda entry: entry["num_stages"] == 1 or entry.get("bits") == 0,
    OUTPUTS=(16, 32, 64),
    SPAN=(32, 64, 128),  # inputs that a warp reads at a time
    num_warps=(2, 4, 8),
    num_stages=(1, 2, 3),
)
_FEWEST_COLUMNS = 8
"""Columns of a tensor-core instruction; the number of positions is padded to at least this size."""


@triton.jit
def norm_linear_kernel(
    x,  # [T, I]
    addend,  # [T, I], read only if ADDS
    scale,  # [I], read only if NORMS
    total,  # x + addend [T, I], written only if ADDS
    levels,  # float32 [16], value of each 4-bit code
    scale_levels,  # float32 [256], value of each code of a quantized scale
    matrix0, matrix1, matrix2,  # one per layer; see `Layer`
    scales0, scales1, scales2,
    group_scales0, group_scales1, group_scales2,
    offset0, offset1, offset2,
    bias0, bias1, bias2,
    y0, y1, y2,  # [T, O]
    outputs0, outputs1, outputs2,  # O of each layer
    num_positions,  # T
    num_inputs,  # I
    epsilon,
    norm_offset,
    LAYERS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POSITIONS: tl.constexpr,  # T or more
    OUTPUTS: tl.constexpr,
    WAYS: tl.constexpr,  # input slices that are multiplied in parallel
    SPAN: tl.constexpr,  # inputs per slice that are read at a time
    UNIT: tl.constexpr,  # adjacent inputs of a span whose weights share a scale
):  # fmt: skip
    """Compute OUTPUTS outputs of one layer for all positions."""
    program = tl.program_id(0)
    tiles0, tiles1 = tl.cdiv(outputs0, OUTPUTS), 0
    if LAYERS > 1:
        tiles1 = tl.cdiv(outputs1, OUTPUTS)
    layer = (program >= tiles0).to(tl.int32) + (program >= tiles0 + tiles1).to(tl.int32)
    tile = program - _pick(layer, 0, tiles0, tiles0 + tiles1, LAYERS)
    num_outputs = _pick(layer, outputs0, outputs1, outputs2, LAYERS)
    matrix = _pick(layer, matrix0, matrix1, matrix2, LAYERS)
    scales = _pick(layer, scales0, scales1, scales2, LAYERS if BITS > 0 else 1)
    group_scales = _pick(layer, group_scales0, group_scales1, group_scales2, LAYERS if GROUP > 0 else 1)
    offset = _pick(layer, offset0, offset1, offset2, LAYERS if GROUP > 0 else 1)
    o = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    t, way = tl.arange(0, POSITIONS), tl.arange(0, WAYS)
    is_output, is_position = (o < num_outputs)[None, :, None], (t < num_positions)[None, :, None]
    row = o.to(tl.int64)[None, :, None] * num_inputs
    sums = tl.zeros((WAYS, OUTPUTS, POSITIONS), dtype=tl.float32)
    squares = tl.zeros((WAYS, POSITIONS), dtype=tl.float32)
    for begin in range(0, num_inputs, WAYS * SPAN):
        first = begin + way * SPAN
        i = first[:, None, None] + tl.arange(0, SPAN)[None, None, :]
        is_input = i < num_inputs
        at, inside = t[None, :, None] * num_inputs + i, is_position & is_input
        s = tl.load(x + at, mask=inside, other=0.0)
        if ADDS:
            s = s.to(tl.float32) + tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
            s = s.to(total.dtype.element_ty)
            if program == 0:
                tl.store(total + at, s, mask=inside)
        s = s.to(tl.float32)
        if NORMS:
            squares += tl.sum(s * s, axis=2)
            s = s * (tl.load(scale + i, mask=is_input, other=0.0).to(tl.float32) + norm_offset)
        own = load_weights(
            matrix, scales, scale_levels, group_scales, offset, levels, row, first, is_output, num_inputs,
            BITS, BLOCK, GROUP, UNIT, SPAN,
        )  # fmt: skip
        sums = _add_product(own, tl.trans(s, 0, 2, 1), sums, x.dtype.element_ty)
    y_of_position = tl.sum(sums, axis=0)
    if NORMS:
        y_of_position *= tl.rsqrt(tl.sum(squares, axis=0) / num_inputs + epsilon)[None, :]
    if HAS_BIAS:
        bias = _pick(layer, bias0, bias1, bias2, LAYERS)
        y_of_position += tl.load(bias + o, mask=o < num_outputs, other=0.0).to(tl.float32)[:, None]
    y = _pick(layer, y0, y1, y2, LAYERS)
    inside = (o < num_outputs)[:, None] & (t < num_positions)[None, :]
    tl.store(y + t[None, :] * num_outputs + o[:, None], y_of_position.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _pick(layer, first, second, third, LAYERS: tl.constexpr):
    """Return the argument with index `layer`; arguments at or after index LAYERS may be None."""
    if LAYERS == 1:
        return first
    elif LAYERS == 2:
        return first if layer == 0 else second
    else:
        return first if layer == 0 else (second if layer == 1 else third)


@triton.jit
def _add_product(left, right, total, DTYPE: tl.constexpr):
    """Return `total` plus the batched product, in the matmul precision for x of dtype DTYPE."""
    if DTYPE.is_bf16():
        total = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), total)
    elif DTYPE.is_fp16():
        total = tl.dot(left.to(tl.float32), right, total, input_precision="tf32")
    else:
        total = tl.dot(left.to(tl.float32), right, total, input_precision="ieee")
    return total


def launch_norm_linear(
    launch: Callable[..., None],
    x: Any,
    layers: Sequence[Layer],
    form: Format,
    scale: Any = None,
    epsilon: float = 0.0,
    offset: float = 0.0,
    addend: Any = None,
    total: Any = None,
) -> None:
    """Launch the kernel on contiguous tensors.

    Args:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        x: [..., I], of at most 16 positions.
        layers: one to three layers whose weights share a format; either all have a bias or none does.
        form: format of the weights.
        scale: weight [I] of the norm; None without a norm.
        epsilon, offset: constants of the norm's formula (ops/rms_norm).
        addend: [..., I], added to x before the norm, or None.
        total: output tensor for x + addend, [..., I]; None without an addend.
    """
    *leading, num_inputs = x.shape
    num_positions = math.prod(leading)
    sizes = SIZES(x, bits=form.bits, element_size=x.element_size(), positions=num_positions)
    span, columns = sizes["SPAN"], max(_FEWEST_COLUMNS, _power_of_two(num_positions))
    outputs = [layer.y.shape[-1] for layer in layers]
    fields = zip(*layers, *[Layer(None, None)] * (MOST_LAYERS - len(layers)), strict=True)
    matrices, ys, biases, scales, group_scales, offsets = fields
    tensors = x, addend, scale, total, form.levels, form.scale_levels
    no_outputs = [None] * (MOST_LAYERS - len(layers))
    per_layer = *matrices, *scales, *group_scales, *offsets, *biases, *ys, *outputs, *no_outputs
    sizes["num_warps"] = min(sizes["num_warps"], _power_of_two(-(-num_inputs // span)))
    flags = {
        "LAYERS": len(layers),
        "ADDS": addend is not None,
        "NORMS": scale is not None,
        "HAS_BIAS": layers[0].bias is not None,
    }
    codes = form.constants(num_inputs, span)
    sizes |= {"POSITIONS": columns, "WAYS": sizes["num_warps"]}
    grid = (sum(-(-each // sizes["OUTPUTS"]) for each in outputs),)
    numbers = num_positions, num_inputs, epsilon, offset
    launch(norm_linear_kernel, grid, *tensors, *per_layer, *numbers, **flags, **codes, **sizes)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`; triton.next_power_of_2 takes microseconds."""
    return 1 << (count - 1).bit_length()
