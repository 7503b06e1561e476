"""Test GGUF tensors: block formats against their formulas, names and row order against transformers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.gguf import gguf_file
from paddlenlp_ext.checkpoint.gguf.read_weights import unpermute_rows
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer

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


def q2_k(block: bytes) -> list[float]:
    scales, codes, d, d_min = block[0:16], block[16:80], half(block, 80), half(block, 82)
    values = []
    for at in range(256):
        half_block, inside = divmod(at, 128)
        code = codes[32 * half_block + inside % 32] >> (2 * (inside // 32)) & 3
        packed = scales[at // 16]
        values.append(d * (packed & 15) * code - d_min * (packed >> 4))
    return values


def q3_k(block: bytes) -> list[float]:
    high, codes, packed, d = block[0:32], block[32:96], block[96:108], half(block, 108)
    scales = [
        (packed[j % 8] >> (4 * (j // 8)) & 15) + ((packed[8 + j % 4] >> (2 * (j // 4)) & 3) << 4) - 32
        for j in range(16)
    ]
    values = []
    for at in range(256):
        half_block, inside = divmod(at, 128)
        shift, i = divmod(inside, 32)
        low = codes[32 * half_block + i] >> (2 * shift) & 3
        keep = high[i] >> (4 * half_block + shift) & 1  # a cleared bit subtracts 4
        values.append(d * scales[at // 16] * (low - (0 if keep else 4)))
    return values


NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes) -> list[float]:
    return [half(block, 0) * NON_LINEAR[q] for q in low_high(block[2:18])]


def iq4_xs(block: bytes) -> list[float]:
    d, high = half(block, 0), int.from_bytes(block[2:4], "little")
    values = []
    for group in range(8):
        low = block[4 + group // 2] >> (4 * (group % 2)) & 15
        scale = (low | (high >> (2 * group) & 3) << 4) - 32
        values += [d * scale * NON_LINEAR[q] for q in low_high(block[8 + 16 * group : 24 + 16 * group])]
    return values


def mxfp4(block: bytes) -> list[float]:
    """Decode E2M1 numbers that share a power-of-two scale, as in the OCP Microscaling Formats specification 1.0."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return [(-1) ** (q >> 3) * magnitudes[q & 7] * 2.0 ** (block[0] - 127) for q in low_high(block[1:17])]


BLOCKS = {  # bytes of a block, offsets of its float16 numbers, its formula
    "Q4_0": (18, (0,), q4_0),
    "Q4_1": (20, (0, 2), q4_1),
    "Q5_0": (22, (0,), q5_0),
    "Q5_1": (24, (0, 2), q5_1),
    "Q8_0": (34, (0,), q8_0),
    "Q2_K": (84, (80, 82), q2_k),
    "Q3_K": (110, (108,), q3_k),
    "Q4_K": (144, (0, 2), q4_k),
    "Q5_K": (176, (0, 2), q5_k),
    "Q6_K": (210, (208,), q6_k),
    "IQ4_NL": (18, (0,), iq4_nl),
    "IQ4_XS": (136, (0,), iq4_xs),
    "MXFP4": (17, (), mxfp4),
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
    if kind == "MXFP4":
        blocks[:, :, 0] = 112 + blocks[:, :, 0] % 32  # exponents of weights
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


def test_gguf_weights_rows_that_heads_cannot_share_are_named(write_gguf):
    path = write_gguf({"llama.attention.head_count": 4}, {"blk.0.attn_q.weight": np.zeros((12, 2), np.float32)})
    with pytest.raises(
        ValueError, match=r"model\.gguf: model\.layers\.0\.self_attn\.q_proj\.weight has 12 rows for 4 h"
    ):
        open_weights(path).read("model.layers.0.self_attn.q_proj.weight")


def test_read_gguf_tensor_unsupported_type_is_named(write_gguf):
    source = open_weights(write_gguf({}, {"token_embd.weight": (np.zeros((2, 54), np.uint8), "TQ1_0")}))
    with pytest.raises(
        ValueError, match=r"token_embd\.weight is stored as TQ1_0, which is not supported; known: F32, .*MXFP4"
    ):
        source.read("model.embed_tokens.weight")


def test_gguf_weights_unsupported_architecture_raises(write_gguf):
    tensors = {"token_embd.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(
        ValueError, match=r"'gptneox' without experts is not supported; known: .* arcee, .* granite, .* qwen3"
    ):
        open_weights(write_gguf({}, tensors, "gptneox"))
    with pytest.raises(
        ValueError, match=r"'granite' with experts is not supported; .* with experts: afmoe, .* llama, .*qwen2moe"
    ):
        open_weights(write_gguf({"granite.expert_count": 8}, tensors, "granite"))


def test_gguf_weights_reads_one_expert_of_a_quantized_stack(write_gguf):
    values = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    blocks = quants.quantize(values, GGMLQuantizationType.Q5_1)
    tensors = {"blk.1.ffn_up_exps.weight": (blocks, "Q5_1")}
    source = open_weights(write_gguf({"qwen3moe.expert_count": 3}, tensors, "qwen3moe"))
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(3)]
    assert source.names() == names
    assert [source.shape(name) for name in names] == [(5, 64)] * 3
    np.testing.assert_allclose(np.stack([source.read(name) for name in names]), values, rtol=0, atol=0.2)


def test_gguf_weights_skips_layers_that_predict_further_tokens(write_gguf):
    metadata = {"expert_count": 4, "block_count": 3, "nextn_predict_layers": 1}
    norms = ["blk.1.attn_norm.weight", "blk.2.attn_norm.weight", "blk.2.nextn.enorm.weight"]
    tensors = {name: np.zeros(2, np.float32) for name in norms}
    path = write_gguf({f"glm4moe.{key}": value for key, value in metadata.items()}, tensors, "glm4moe")
    assert open_weights(path).names() == ["model.layers.1.input_layernorm.weight"]


def test_gguf_weights_unknown_tensors_are_named(write_gguf):
    with pytest.raises(ValueError, match=r"unknown tensors for a \w+ model: blk\.0\.ssm_in\.weight"):
        open_weights(write_gguf({}, {"blk.0.ssm_in.weight": np.zeros((2, 2), np.float32)}))


def write_parts(golden: Path, folder: Path, omitted: Collection[str] = (), repeated: str = "") -> list[Path]:
    """Split the golden Llama file into three parts, as llama.cpp's splitter does: the first one has the metadata."""
    count = 3
    file = gguf_file.open_gguf(golden / "checkpoint_llama.gguf")
    names, paths = list(file.tensors), []
    for number in range(count):
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        writer = GGUFWriter(path, "llama")
        if number == 0:
            for key, value in file.metadata.items():
                if key != "general.architecture":
                    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
                    add.get(type(value), writer.add_array)(key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names))
        here = [name for name in names if name in names[number::count] or name == repeated]
        for name in (name for name in here if name not in omitted):
            tensor = file.tensors[name]
            raw = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.start)
            writer.add_tensor(name, raw.reshape(*tensor.shape[:-1], -1), raw_dtype=GGMLQuantizationType[tensor.type])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.mark.parametrize("opened", [0, 2])
def test_open_weights_of_a_split_model_equals_the_single_file(opened, golden, tmp_path):
    parts = write_parts(golden, tmp_path)
    single, split = open_weights(golden / "checkpoint_llama.gguf"), open_weights(parts[opened])
    assert set(split.names()) == set(single.names())
    for name in single.names():
        assert np.array_equal(split.read(name), single.read(name)), name
    assert read_model_config(parts[opened]) == read_model_config(golden / "checkpoint_llama.gguf")
    texts = ["AB", "!!A", ""]
    expected = load_tokenizer(golden / "checkpoint_llama.gguf")(texts)
    assert load_tokenizer(parts[opened])(texts)["input_ids"] == expected["input_ids"]


def test_open_gguf_split_model_without_a_part_names_it(golden, tmp_path):
    parts = write_parts(golden, tmp_path)
    parts[1].unlink()
    for opened in (parts[0], parts[2]):
        message = r"tiny-00002-of-00003\.gguf: no such file; the model has 3 files, which must all be in this folder"
        with pytest.raises(ValueError, match=message):
            open_weights(opened)
    parts[1].write_bytes(parts[2].read_bytes())
    message = (
        r"tiny-00002-.*file 3 of 3 according to the metadata, but file 2 of 3 .*rename the file to NAME-00003-of-00003"
    )
    with pytest.raises(ValueError, match=message):
        open_weights(parts[0])


def test_open_gguf_part_under_another_name_says_how_to_rename(golden, tmp_path):
    parts = write_parts(golden, tmp_path)
    renamed = parts[1].rename(tmp_path / "tiny.gguf")
    with pytest.raises(
        ValueError, match=r"file 2 of 3 according to the metadata.*rename the file to NAME-00002-of-00003\.gguf"
    ):
        open_weights(renamed)
    whole = tmp_path / "whole-00001-of-00002.gguf"
    whole.write_bytes((golden / "checkpoint_llama.gguf").read_bytes())
    (tmp_path / "whole-00002-of-00002.gguf").touch()
    with pytest.raises(ValueError, match=r"whole-00002-of-00002\.gguf: not a readable GGUF file"):
        open_weights(whole)
    (tmp_path / "whole-00002-of-00002.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(
        ValueError,
        match=r"file 1 of 1 according to the metadata, but file 1 of 2 .*rename the file to NAME\.g",
    ):
        open_weights(whole)


def test_open_gguf_parts_that_do_not_belong_together_raise(golden, tmp_path):
    parts = write_parts(golden, tmp_path, omitted={"output.weight"})
    with pytest.raises(ValueError, match=r"split\.tensors\.count is 12, but the files have 11 tensors"):
        open_weights(parts[0])
    parts = write_parts(golden, tmp_path, repeated="output.weight")
    with pytest.raises(
        ValueError, match=r"tiny-0000.-of-00003\.gguf: tensor output\.weight is also in an earlier file"
    ):
        open_weights(parts[0])


@pytest.mark.parametrize("keep", [2, 30, 300, -40])
def test_open_gguf_truncated_file_is_named(golden, tmp_path, keep):
    content = (golden / "checkpoint_llama.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"model\.gguf: not a readable GGUF file"):
        open_weights(tmp_path / "model.gguf")


def test_open_gguf_without_library_says_what_to_install(golden, monkeypatch):
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
        open_weights(golden / "checkpoint_llama.gguf")
