"""Types of the tensors in a written GGUF file, and the rounding error of each type.

As in llama.cpp, some tensors are stored in a format that differs from the requested format:

| tensor | format |
| --- | --- |
| vectors, biases, norms, routers, kernels of short convolutions, RoPE factors | F32 |
| requested format is quantized, row width is not a multiple of 32 | F16 |
| requested format is Q4_0 or Q4_1: output.weight, or token_embd.weight if output.weight is tied | Q8_0 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

OUTTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_BLOCK = 32
_BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1")
_FULL_PRECISION = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"),
    *("shortconv.conv.weight", "ssm_conv1d.weight", "ssm_norm.weight"),
)
_HALF_ULP, _HALF_TINY = 2.0**-11, 2.0**-25
"""Maximum relative error of rounding to float16, and maximum absolute error for subnormal values."""


def type_of(name: str, shape: Sequence[int], outtype: str, has_output: bool) -> str:
    """Return the GGUF type in which a tensor is stored.

    Args:
        name: GGUF name of the tensor.
        shape: shape of the tensor, rows first.
        outtype: requested format, one of `OUTTYPES`.
        has_output: whether the model has a tensor output.weight.
    """
    kind = outtype.upper()
    if len(shape) == 1 or not name.endswith(".weight") or name.endswith(_FULL_PRECISION):
        return "F32"
    if kind in ("Q4_0", "Q4_1") and name == ("output.weight" if has_output else "token_embd.weight"):
        kind = "Q8_0"
    return "F16" if kind in _BLOCK_TYPES and shape[-1] % _BLOCK else kind


def rounding_bound(rows: np.ndarray, kind: str) -> np.ndarray:
    """Return an upper bound of the rounding error of each value, broadcastable to [rows, width].

    Args:
        rows: float32 [rows, width].
        kind: name of the GGUF type.
    """
    import numpy as np

    if kind == "F32":
        return np.zeros((1, 1), np.float32)
    if kind == "BF16":
        return np.abs(rows) * 2.0**-8 + 2.0**-134
    if kind == "F16":
        return np.abs(rows) * _HALF_ULP + _HALF_TINY
    blocks = rows.reshape(len(rows), -1, _BLOCK).astype(np.float64)
    largest, span = np.abs(blocks).max(-1), np.ptp(blocks, axis=-1)
    # Half a quantization step, plus the error from rounding the scale to float16. Q4_0 needs a full step, because one
    # end of its symmetric range has no code.
    bound = {
        "Q8_0": largest * (0.5 / 127 + _HALF_ULP) + 127 * _HALF_TINY,
        "Q4_0": largest * (1 / 8 + _HALF_ULP) + 8 * _HALF_TINY,
        "Q4_1": span / 30 + (span + largest) * _HALF_ULP + 16 * _HALF_TINY,
    }[kind]
    return np.repeat(bound * (1 + 1e-5), _BLOCK, axis=-1)
