"""The number format of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle


def autocast(precision: Any) -> AbstractContextManager[Any]:
    """Context for a forward pass: bf16 with O1 on an accelerator casts matmuls; everything else needs no context.

    With O2 the weights themselves are bf16; on the CPU, which has no bf16 matmul, fp32 is computed.

    Args:
        precision: `config.precision`.

    Raises:
        ValueError: fp16 on an accelerator, whose gradients would need loss scaling.
    """
    if paddle.device.get_device().startswith("cpu"):
        return nullcontext()
    if precision.fp16:
        raise ValueError("fp16: true is not available: its gradients need loss scaling; use bf16: true")
    if precision.bf16 and precision.fp16_opt_level == "O1":
        return paddle.amp.auto_cast(level="O1", dtype="bfloat16")
    return nullcontext()
