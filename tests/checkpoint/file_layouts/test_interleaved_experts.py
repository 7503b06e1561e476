"""Files of gpt-oss: interleaved gate and up, and weights in MXFP4."""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.interleaved_experts import InterleavedExperts
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, SafetensorsFile, write_safetensors
from paddlenlp_ext.sharding_spec import Shard
from tests.common.arrays import normal

LAYER, LAYOUT = "model.layers.1.mlp.", InterleavedExperts()
MEMORY = {
    f"{LAYER}experts.gate_up_proj.weight": normal(1, 3, 8, 5),
    f"{LAYER}experts.gate_up_proj_bias": normal(2, 3, 8),
    f"{LAYER}experts.down_proj.weight": normal(3, 3, 5, 4),
    f"{LAYER}experts.down_proj_bias": normal(4, 3, 5),
    f"{LAYER}router.weight": normal(5, 3, 5),
    f"{LAYER}router.bias": normal(6, 3),
    "model.norm.weight": normal(7, 5),
}


def test_files_have_gate_and_up_interleaved_and_inputs_first():
    written = {name: as_array(tensor) for name, tensor in LAYOUT.to_files(MEMORY).items()}
    gate_up, stored = MEMORY[f"{LAYER}experts.gate_up_proj.weight"], written[f"{LAYER}experts.gate_up_proj"]
    assert stored.shape == (3, 5, 8)
    np.testing.assert_array_equal(stored[:, :, ::2], np.swapaxes(gate_up[:, :4], 1, 2))
    np.testing.assert_array_equal(stored[:, :, 1::2], np.swapaxes(gate_up[:, 4:], 1, 2))
    bias = MEMORY[f"{LAYER}experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(written[f"{LAYER}experts.gate_up_proj_bias"][:, 1::2], bias[:, 4:])
    np.testing.assert_array_equal(written[f"{LAYER}router.bias"], MEMORY[f"{LAYER}router.bias"])


def as_array(tensor):
    return tensor.read() if isinstance(tensor, LazyTensor) else tensor


def test_open_is_the_inverse_of_to_files(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", LAYOUT.to_files(MEMORY))
    weights = LAYOUT.open(SafetensorsFile(tmp_path / "x.safetensors"))
    assert set(weights.names()) == set(MEMORY)
    for name, values in MEMORY.items():
        assert weights.shape(name) == values.shape
        np.testing.assert_array_equal(weights.read(name), values, err_msg=name)
        if ".experts." in name:
            np.testing.assert_array_equal(weights.read(name, shard=Shard(0, 1, 3, 3)), values[1:], err_msg=name)


def test_open_dequantizes_mxfp4(tmp_path):
    """Compare with the format: a sign bit, two bits of exponent and one of mantissa, times 2^(scale - 127)."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = random.integers(120, 135, (2, 6, 3)).astype(np.uint8)
    stored = {f"{LAYER}experts.gate_up_proj_blocks": blocks, f"{LAYER}experts.gate_up_proj_scales": scales}
    write_safetensors(tmp_path / "x.safetensors", stored)
    weights, name = LAYOUT.open(SafetensorsFile(tmp_path / "x.safetensors")), f"{LAYER}experts.gate_up_proj.weight"
    assert weights.names() == [name] and weights.shape(name) == (2, 6, 96) and weights.dtype(name) == "bfloat16"

    def value(code):
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        return -size if code & 8 else size

    expected = np.zeros((2, 6, 96))
    for expert, row, column in np.ndindex(expected.shape):
        block, place = divmod(column, 32)
        byte = int(blocks[expert, row, block, place // 2])
        code = byte >> 4 if place % 2 else byte & 15
        memory_row = row // 2 + (3 if row % 2 else 0)
        expected[expert, memory_row, column] = value(code) * 2.0 ** (int(scales[expert, row, block]) - 127)
    np.testing.assert_array_equal(weights.read(name, "float32"), expected)
    np.testing.assert_array_equal(weights.read(name, "float32", Shard(0, 1, 2, 2)), expected[1:])
    bits = weights.read(name)  # 3 significant bits: bfloat16 holds every value
    np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), expected)
