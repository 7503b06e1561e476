"""The number format of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle

from paddlenlp_ext.ops.cpu.bf16 import products_in_bf16


def autocast(precision: Any) -> AbstractContextManager[Any]:
    """Context for a forward pass: under O1 matrix products are cast to bf16; with O2 the weights themselves are bf16.

    On the CPU products round their inputs to bf16 under both; sums and everything else are fp32 there (ops/cpu/bf16.py).

    Args:
        precision: `config.precision`.

    Raises:
        ValueError: fp16, whose gradients would need loss scaling.
    """
    dtype = precision.compute_dtype
    if dtype == "float16":
        raise ValueError("fp16: true is not available: its gradients need loss scaling; use bf16: true")
    if dtype == "bfloat16" and precision.device == "cpu":
        return products_in_bf16()
    if dtype == "float32" or precision.fp16_opt_level != "O1":
        return nullcontext()
    return paddle.amp.auto_cast(level="O1", dtype=dtype)
