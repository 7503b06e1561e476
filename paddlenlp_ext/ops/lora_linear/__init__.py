"""LoRA linear layer, `x W^T + bias + s (x A^T) B^T` (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.lora_linear.cpp import lora_linear_cpp
from paddlenlp_ext.ops.lora_linear.reference import lora_linear_reference
from paddlenlp_ext.ops.lora_linear.triton import lora_linear_triton
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

lora_linear_op = DispatchedOp(
    "LoRA linear",
    cpp=(lora_linear_cpp, library.with_products(library.usable)),
    triton=(lora_linear_triton, floats_on_gpu_with_triton),
    reference=lora_linear_reference,
)


def lora_linear(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """Map [..., in] to [..., out] as `base(x) + s (x A^T) B^T`.

    Args:
        x: [..., in].
        base: frozen linear layer x W^T + bias.
        a: A [r, in].
        b: B [out, r].
        scaling: factor s of the update.
    """
    return lora_linear_op.choose(x)(x, base, a, b, scaling)
