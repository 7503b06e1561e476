"""Registry of the packed integer formats, by `quant_method` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.quantized_formats.auto_round import AUTO_ROUND, auto_round_layout
from paddlenlp_ext.checkpoint.quantized_formats.awq import AWQLayout
from paddlenlp_ext.checkpoint.quantized_formats.compressed_tensors import CompressedTensorsLayout
from paddlenlp_ext.checkpoint.quantized_formats.gptq import GPTQLayout
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import PackedLayout
from paddlenlp_ext.checkpoint.quantized_formats.supported_formats import unsupported

LAYOUTS: dict[str, type[PackedLayout]] = {
    layout.method: layout for layout in (CompressedTensorsLayout, GPTQLayout, AWQLayout)
}
"""`quant_method` -> class of the format, for the formats that are also written."""


def read_layout(config: Mapping[str, Any]) -> PackedLayout | None:
    """Return the packed integer format that a `quantization_config` describes; None for other quantization methods.

    Raises:
        ValueError: a value has the wrong type, or the variant of the format is not supported.
    """
    method = config.get("quant_method")
    if method != AUTO_ROUND and method not in LAYOUTS:
        return None
    layout = auto_round_layout(config) if method == AUTO_ROUND else LAYOUTS[method].from_config(config)
    if layout.bits not in (4, 8):
        raise unsupported(method, f"weights of {layout.bits} bits")
    return layout
