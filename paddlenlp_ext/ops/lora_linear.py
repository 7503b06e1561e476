"""A dense layer with a low-rank update, `x W^T + bias + s (x A^T) B^T` (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops import native
from paddlenlp_ext.ops.dispatch import Op
from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.lora_linear_native import lora_linear_native


def lora_linear_reference(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """The formula, product by product."""
    inner = paddle.matmul(x, a, transpose_y=True) * scaling
    return base(x) + paddle.matmul(inner, b, transpose_y=True)


lora_linear_op = Op("LoRA linear", native=(lora_linear_native, native.usable), reference=lora_linear_reference)


def lora_linear(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """Map [..., in] to [..., out].

    Args:
        x: [..., in].
        base: x W^T + bias.
        a, b: A [r, in] and B [out, r].
        scaling: s.
    """
    return lora_linear_op.choose(x)(x, base, a, b, scaling)
