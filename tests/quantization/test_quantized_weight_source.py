"""Parts of fused layers that are stored quantized."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.file_layouts.fused_projections import SplitWeights
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.quantization.checkpoint_tensors import tensors_to_store
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize_layer
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from tests.common.golden import ArrayWeights

LAYERS = {"qkv_proj": {"q_proj": 40, "k_proj": 8, "v_proj": 8}}


def stored(width: int, layers: dict[str, dict[str, int]] | None) -> QuantizedWeights:
    """Return the weights of a file with a quantized qkv_proj of 56 rows; split into `layers` if given."""
    weight = np.random.default_rng(0).standard_normal((56, width)).astype(np.float32)
    options = QuantizationConfig(algo="nf4", double_quant=True)
    packed = quantize_layer("a.qkv_proj", paddle.to_tensor(weight), options.for_layers(["a.qkv_proj"])["a.qkv_proj"])
    tensors = {name: as_lazy(each).read() for name, each in tensors_to_store("a.qkv_proj", packed, "float32").items()}
    source = ArrayWeights({**tensors, "a.norm.weight": weight[0]})
    return QuantizedWeights(source if layers is None else SplitWeights(source, layers))


@pytest.mark.parametrize("width", [64, 24])
def test_quantized_weights_of_a_part_are_its_rows_to_the_bit(width: int):
    fused, parts = stored(width, None), stored(width, LAYERS)
    assert parts.names() == ["a.norm.weight", "a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"]
    rows = np.split(fused.read("a.qkv_proj.weight"), [40, 48])
    for part, expected in zip(LAYERS["qkv_proj"], rows, strict=True):
        name = f"a.{part}.weight"
        assert (parts.shape(name), parts.dtype(name)) == (expected.shape, "float32")
        assert np.array_equal(parts.read(name), expected)


@pytest.mark.parametrize(
    ("width", "sizes", "message"),
    [
        (5, LAYERS["qkv_proj"], r"a\.qkv_proj is stored quantized and cannot be split.*start from the original model"),
        (
            64,
            {"q_proj": 40, "k_proj": 8},
            r"a\.qkv_proj has 56 outputs, but according to config.json its projections \(q_proj, k_proj\) have 48",
        ),
    ],
)
def test_quantized_weights_of_parts_that_do_not_fit_raise(width: int, sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        stored(width, {"qkv_proj": sizes}).read("a.k_proj.weight")
