"""Test GGUF tensors: block formats against their formulas, names and row order against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint import gguf
from paddlenlp_ext.checkpoint.gguf.weights import unpermute_rows
from paddlenlp_ext.checkpoint.open_weights import open_weights

# Block layouts of ggml-common.h: each function decodes the bytes of one block, one value at a time.


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def low_high(bytes_: bytes) -> list[int]:
    return [b & 15 for b in bytes_] + [b >> 4 for b in bytes_]


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (q - 8) for q in low_high(block[2:18])]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * q + half(block, 2) for q in low_high(block[4:20])]


def q5_0(block: bytes) -> list[float]:
    fifth = int.from_bytes(block[2:6], "little")
    return [half(block, 0) * ((q | (fifth >> i & 1) << 4) - 16) for i, q in enumerate(low_high(block[6:22]))]


def q5_1(block: bytes) -> list[float]:
    fifth = int.from_bytes(block[4:8], "little")
    return [half(block, 0) * (q | (fifth >> i & 1) << 4) + half(block, 2) for i, q in enumerate(low_high(block[8:24]))]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in np.frombuffer(block[2:34], np.int8).tolist()]


def k_scales(packed: bytes) -> list[tuple[int, int]]:
    """Decode eight 6-bit (scale, minimum) pairs from 12 bytes."""
    first = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    last = [
        (packed[j + 4] & 15 | (packed[j - 4] >> 6) << 4, packed[j + 4] >> 4 | (packed[j] >> 6) << 4)
        for j in range(4, 8)
    ]
    return first + last


def q4_k(block: bytes) -> list[float]:
    d, d_min, scales, codes = half(block, 0), half(block, 2), k_scales(block[4:16]), block[16:144]
    values = []
    for group, (scale, minimum) in enumerate(scales):
        for i in range(32):
            code = codes[group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            values.append(d * scale * code - d_min * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    d, d_min, scales = half(block, 0), half(block, 2), k_scales(block[4:16])
    fifth, codes = block[16:48], block[48:176]
    values = []
    for group, (scale, minimum) in enumerate(scales):
        for i in range(32):
            code = (codes[group // 2 * 32 + i] >> (4 * (group % 2)) & 15) | (fifth[i] >> group & 1) << 4
            values.append(d * scale * code - d_min * minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, d = block[0:128], block[128:192], half(block, 208)
    scales = np.frombuffer(block[192:208], np.int8).tolist()
    values = []
    for at in range(256):
        half_block, inside = divmod(at, 128)
        quarter, i = divmod(inside, 32)
        nibble = low[64 * half_block + 32 * (quarter % 2) + i] >> (4 * (quarter // 2)) & 15
        code = (nibble | (high[32 * half_block + i] >> (2 * quarter) & 3) << 4) - 32
        values.append(d * scales[at // 16] * code)
    return values


BLOCKS = {  # bytes of a block, offsets of its float16 numbers, its formula
    "Q4_0": (18, (0,), q4_0),
    "Q4_1": (20, (0, 2), q4_1),
    "Q5_0": (22, (0,), q5_0),
    "Q5_1": (24, (0, 2), q5_1),
    "Q8_0": (34, (0,), q8_0),
    "Q4_K": (144, (0, 2), q4_k),
    "Q5_K": (176, (0, 2), q5_k),
    "Q6_K": (210, (208,), q6_k),
}


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("kind", BLOCKS)
def test_read_gguf_tensor_blocks_follow_formula(kind, num_blocks, write_gguf):
    size, scales_at, formula = BLOCKS[kind]
    rng = np.random.default_rng(num_blocks)
    blocks = rng.integers(0, 256, (5, num_blocks, size), dtype=np.uint8)
    for at in scales_at:
        scale = rng.uniform(-0.1, 0.1, (5, num_blocks, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = scale.view(np.uint8)
    expected = [[value for block in row for value in formula(block.tobytes())] for row in blocks]
    source = open_weights(write_gguf({}, {"token_embd.weight": (blocks.reshape(5, -1), kind)}))
    got = source.read("model.embed_tokens.weight")
    assert source.shape("model.embed_tokens.weight") == got.shape == np.shape(expected)
    assert got.dtype == np.float32 and source.dtype("model.embed_tokens.weight") == "float32"
    np.testing.assert_allclose(got, np.array(expected), rtol=1e-5, atol=1e-6)


def test_gguf_weights_plain_formats_keep_bits(write_gguf):
    bits = np.random.default_rng(0).integers(0, 0x7F00, (3, 5)).astype(np.uint16)
    tensors = {
        "token_embd.weight": (bits.view(np.uint8), "BF16"),
        "output.weight": np.float16([[1.5, -2.25, 6e-8]]),
        "output_norm.weight": np.float32([1e-40, 3.0]),
    }
    source = open_weights(write_gguf({}, tensors))
    assert source.dtype("model.embed_tokens.weight") == "bfloat16"
    assert np.array_equal(source.read("model.embed_tokens.weight"), bits)
    assert source.dtype("lm_head.weight") == "float16"
    assert np.array_equal(source.read("lm_head.weight"), tensors["output.weight"])
    assert np.array_equal(source.read("model.norm.weight"), tensors["output_norm.weight"])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_weights_match_transformers(architecture, golden):
    source = open_weights(golden / f"checkpoint_{architecture}.gguf")
    expected = dict(np.load(golden / f"checkpoint_{architecture}.npz"))
    if architecture != "llama":
        assert np.array_equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(source.read(name, "float32"), values), name


def test_unpermute_rows_inverts_converter():
    rows = np.arange(2 * 8 * 3).reshape(16, 3)  # 2 heads of 8 channels
    permuted = rows.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)  # llama.cpp: (head, half, i) -> (head, i, half)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute_rows(permuted, 2), rows)
    assert np.array_equal(unpermute_rows(permuted[:, 0], 2), rows[:, 0])


def test_read_gguf_tensor_unsupported_type_is_named(write_gguf):
    source = open_weights(write_gguf({}, {"token_embd.weight": (np.zeros((2, 84), np.uint8), "Q2_K")}))
    with pytest.raises(
        ValueError, match=r"token_embd\.weight is stored as Q2_K, which is not supported; known: F32, .*Q6_K"
    ):
        source.read("model.embed_tokens.weight")


def test_gguf_weights_unsupported_architecture_raises(write_gguf):
    with pytest.raises(ValueError, match="architecture 'gemma3' is not supported; known: llama, qwen2, qwen3"):
        open_weights(write_gguf({}, {"token_embd.weight": np.zeros((2, 2), np.float32)}, "gemma3"))
    with pytest.raises(ValueError, match="mixture of experts"):
        open_weights(write_gguf({"llama.expert_count": 8}, {"token_embd.weight": np.zeros((2, 2), np.float32)}))


def test_gguf_weights_unknown_tensors_are_named(write_gguf):
    with pytest.raises(ValueError, match=r"does not have: blk\.0\.ssm_in\.weight"):
        open_weights(write_gguf({}, {"blk.0.ssm_in.weight": np.zeros((2, 2), np.float32)}))


@pytest.mark.parametrize("keep", [2, 30, 300, -40])
def test_open_gguf_truncated_file_is_named(golden, tmp_path, keep):
    content = (golden / "checkpoint_llama.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"model\.gguf: not a GGUF file, or damaged or truncated"):
        open_weights(tmp_path / "model.gguf")


def test_open_gguf_without_library_says_what_to_install(golden, monkeypatch):
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
        open_weights(golden / "checkpoint_llama.gguf")
