"""AutoRound checkpoints: tensors against the formulas of their packing formats, and unsupported variants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.quantized_formats.registry import read_layout
from paddlenlp_ext.checkpoint.quantized_formats.repack import PackedWeights
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.checkpoint_tensors import read_stored, stored_layers
from paddlenlp_ext.quantization.config_json import from_quantization_config
from tests.common.golden import ArrayWeights

OUT, IN, GROUP = 16, 32, 8
OPTIONS = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Pack the last axis into int32 words, the first code of `order` in the lowest bits."""
    codes = codes.reshape(*codes.shape[:-1], -1, 32 // bits)[..., order or range(32 // bits)].astype(np.int64)
    packed = (codes << (bits * np.arange(32 // bits))).sum(axis=-1)
    return packed.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize(
    ("packing", "bits"),
    [("auto_gptq", 4), ("auto_gptq", 8), ("gptqmodel", 4), ("tritonv2", 8), ("auto_awq", 4)],
)
def test_weights_of_auto_round_are_codes_minus_zero_points_times_scales(packing: str, bits: int):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (OUT, IN))
    zeros = rng.integers(1, 2**bits, (OUT, IN // GROUP))
    scales = rng.random((OUT, IN // GROUP)).astype(np.float32)
    if packing == "auto_awq":
        stored = {"a.qweight": words(codes.T, bits, AWQ_ORDER), "a.qzeros": words(zeros.T, bits, AWQ_ORDER)}
    else:
        minus = 1 if packing == "auto_gptq" else 0
        stored = {"a.qweight": words(codes, bits).T, "a.qzeros": words(zeros.T - minus, bits)}
    layout = read_layout({**OPTIONS, "bits": bits, "packing_format": f"auto_round:{packing}"})
    assert layout is not None
    source = PackedWeights(ArrayWeights({**stored, "a.scales": scales.T}), layout)
    found = dequantize(read_stored("a", stored_layers(source)["a"], source)).numpy()
    expected = (codes - zeros.repeat(GROUP, axis=1)) * scales.repeat(GROUP, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_quantization_config_of_auto_round_with_unquantized_layers_is_read():
    extra = {"model.layers.0.mlp.down_proj": {"bits": 16, "act_bits": 16}, "lm_head": {"group_size": GROUP}}
    options = from_quantization_config({**OPTIONS, "packing_format": "auto_round:auto_gptq", "extra_config": extra})
    assert options is not None and options.algo == "weight_only_int4" and options.group_size == GROUP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, "auto-round with the packing_format 'auto_round:fp8_static' is"),
        ({}, "auto-round with the packing_format 'None'"),
        ({"packing_format": "auto_round:auto_gptq", "data_type": "mx_fp"}, "auto-round with weights of type 'mx_fp'"),
        ({"packing_format": "auto_round:auto_gptq", "bits": 2}, "auto-round with weights of 2 bits"),
        (
            {"packing_format": "auto_round:auto_gptq", "extra_config": {"a.b": {"bits": 8}}},
            "auto-round with weights of 4 bits, and of 8 bits in a.b, is not supported.*start from the original model",
        ),
        ({"packing_format": "auto_round:auto_gptq", "extra_config": [1]}, r"extra_config is \[1\], not an object"),
    ],
)
def test_quantization_config_of_an_unsupported_auto_round_variant_raises(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        from_quantization_config({**OPTIONS, **changes})
