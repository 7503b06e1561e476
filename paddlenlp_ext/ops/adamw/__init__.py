"""AdamW steps for many tensors (Loshchilov and Hutter 2019, arXiv:1711.05101).

With learning rate r, weight decay d, step t and gradient g:

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    w = (1 - r d) w - r (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

| op | parameters | moments |
| --- | --- | --- |
| `adamw_op` | float32 | float32 |
| `adamw_bf16_op` | bfloat16, with a float32 copy (`master`) or with stochastic rounding | float32 |
| `adamw_8bit_op` | float32, or half precision like `adamw_bf16_op` | 8 bits (quantizer_8bit.py) |

Without a float32 copy, rounding to the nearest bfloat16 value would lose most updates, because most updates are smaller
than half the gap between adjacent bfloat16 values. All backends of `adamw_8bit_op` store the same codes.
"""

from __future__ import annotations

from paddlenlp_ext.ops.adamw.cpp import adamw_8bit_cpp, adamw_bf16_cpp, adamw_cpp, usable_on_bf16
from paddlenlp_ext.ops.adamw.quantizer_8bit import dynamic_8bit
from paddlenlp_ext.ops.adamw.reference import adamw_8bit_reference, adamw_bf16_reference, adamw_reference
from paddlenlp_ext.ops.adamw.triton import adamw_8bit_triton, adamw_bf16_triton, adamw_triton
from paddlenlp_ext.ops.adamw.updates import BLOCK, AdamStep, AdamW8BitUpdate, AdamWUpdate, Bf16Update, Moments8Bit
from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton

__all__ = [
    "BLOCK",
    "AdamStep",
    "AdamW8BitUpdate",
    "AdamWUpdate",
    "Bf16Update",
    "Moments8Bit",
    "adamw_8bit_op",
    "adamw_bf16_op",
    "adamw_op",
    "dynamic_8bit",
]


adamw_op = DispatchedOp(
    "adamw", cpp=(adamw_cpp, usable), triton=(adamw_triton, on_gpu_with_triton), reference=adamw_reference
)

adamw_bf16_op = DispatchedOp(
    "adamw in bfloat16",
    cpp=(adamw_bf16_cpp, usable_on_bf16),
    triton=(adamw_bf16_triton, on_gpu_with_triton),
    reference=adamw_bf16_reference,
)

adamw_8bit_op = DispatchedOp(
    "adamw in 8 bits",
    cpp=(adamw_8bit_cpp, usable),
    triton=(adamw_8bit_triton, on_gpu_with_triton),
    reference=adamw_8bit_reference,
)
