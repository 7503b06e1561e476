"""Error that lists the supported formats of quantized checkpoints."""

from __future__ import annotations

from typing import Any

SUPPORTED_FORMATS = (
    "gptq, auto-round and compressed-tensors (pack-quantized) in 4 and 8 bits",
    "awq (gemm) in 4 bits",
    "compressed-tensors in int8 (int-quantized) and FP8 (float-quantized)",
)
"""Formats for the error message: `quant_method`, variant and number of bits."""


def unsupported(method: Any, variant: str) -> ValueError:
    """Return the error for an unsupported variant of a format; the message lists the supported formats."""
    return ValueError(
        f"quantization_config in config.json: {method} with {variant} is not supported; known: "
        f"{', '.join(SUPPORTED_FORMATS)}; start from the original model"
    )
