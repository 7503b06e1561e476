"""AutoRound checkpoints (Cheng et al. 2023, arXiv:2309.05516), whose tensors have the layouts of GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.quantized_formats.awq import AWQLayout
from paddlenlp_ext.checkpoint.quantized_formats.gptq import GPTQLayout, GPTQv2Layout
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import PackedLayout, mapping_option, whole_option
from paddlenlp_ext.checkpoint.quantized_formats.supported_formats import unsupported

AUTO_ROUND = "auto-round"
"""Value of `quant_method` in config.json."""
_LAYOUTS: dict[str, type[PackedLayout]] = {
    "auto_round:auto_gptq": GPTQLayout,
    "auto_round:gptq": GPTQLayout,
    "auto_round:auto_awq": AWQLayout,
    "auto_round:awq": AWQLayout,
    "auto_round:gptqmodel": GPTQv2Layout,
    "auto_round:exllamav2": GPTQv2Layout,
    "auto_round:tritonv2": GPTQv2Layout,
    "auto_round": GPTQv2Layout,
}
"""`packing_format` -> layout of the tensors. Only the formats `auto_gptq` and `gptq` store zero points minus 1."""
_UNQUANTIZED_BITS = 16


def auto_round_layout(config: Mapping[str, Any]) -> PackedLayout:
    """Return the layout of a model's quantized layers.

    Args:
        config: `quantization_config` of config.json.

    Raises:
        ValueError: the packing format is unknown, weights are not integers, or quantized layers have
            different bit widths.
    """
    packing = str(config.get("packing_format") or config.get("backend"))
    if packing not in _LAYOUTS:
        raise unsupported(AUTO_ROUND, f"the packing_format {packing!r}")
    if config.get("data_type", "int") != "int":
        raise unsupported(AUTO_ROUND, f"weights of type {config['data_type']!r}")
    bits, layers = whole_option(config, "bits"), mapping_option(config, "extra_config")
    for layer in layers:
        own = whole_option({"bits": bits, **mapping_option(layers, layer)}, "bits")
        if own != bits and own < _UNQUANTIZED_BITS:
            raise unsupported(AUTO_ROUND, f"weights of {bits} bits, and of {own} bits in {layer},")
    chosen = _LAYOUTS[packing]
    version = {"checkpoint_format": "gptq_v2"} if chosen is GPTQv2Layout else {}
    known = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
    return chosen.from_config({**known, **version})
