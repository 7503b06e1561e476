"""Written GGUF files: types of tensors, rounding, and values that a type cannot hold."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.read_weights import read_gguf_tensor
from paddlenlp_ext.checkpoint.gguf.tensor_types import OUTTYPES, type_of
from paddlenlp_ext.checkpoint.gguf.write_file import StoredTensor, write_gguf
from tests.common.arrays import normal

LARGEST_ERROR = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 0.5 / 112, "Q4_0": 1 / 7.9, "Q4_1": 1 / 14.9}
"""Relative to the largest value of a block, as the formats define their steps."""


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_write_gguf_rounds_within_the_steps_of_its_blocks(outtype, tmp_path):
    values = normal(1, 3, 50, 96) * np.logspace(-6, 2, 50, dtype=np.float32)[:, None]
    stored = StoredTensor(values.shape, [lambda i=i: values[i] for i in range(3)])
    write_gguf(tmp_path / "a.gguf", "llama", {"llama.x": 0.5}, {"blk.0.ffn_up_exps.weight": stored}, outtype)
    file = open_gguf(tmp_path / "a.gguf")
    read = read_gguf_tensor(file, "blk.0.ffn_up_exps.weight")
    kind = file.tensors["blk.0.ffn_up_exps.weight"].type
    read = bfloat16_to_float32(read) if kind == "BF16" else read.astype(np.float32)
    error = np.abs(read - values).reshape(3, 50, -1, 32).max(-1)
    largest = np.abs(values).reshape(3, 50, -1, 32).max(-1)
    assert kind == outtype.upper() and (error <= LARGEST_ERROR[kind] * largest + 4e-6).all()
    assert (error > 0).mean() > 0.9 or kind == "F32"
    assert file.metadata["llama.x"] == 0.5


@pytest.mark.parametrize(
    ("name", "shape", "outtype", "has_output", "expected"),
    [
        ("blk.0.attn_norm.weight", (64,), "q4_0", True, "F32"),
        ("blk.0.attn_q.bias", (64,), "f16", True, "F32"),
        ("blk.0.ffn_up_exps.bias", (4, 64), "f16", True, "F32"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "bf16", True, "F32"),
        ("blk.0.shortconv.conv.weight", (64, 3), "f16", False, "F32"),
        ("blk.0.ssm_conv1d.weight", (64, 4), "bf16", False, "F32"),
        ("blk.0.attn_q.weight", (64, 64), "q4_1", True, "Q4_1"),
        ("blk.0.attn_q.weight", (64, 40), "q8_0", True, "F16"),
        ("output.weight", (64, 64), "q4_0", True, "Q8_0"),
        ("token_embd.weight", (64, 64), "q4_0", True, "Q4_0"),
        ("token_embd.weight", (64, 64), "q4_1", False, "Q8_0"),
        ("token_embd.weight", (64, 64), "q8_0", False, "Q8_0"),
    ],
)
def test_type_of_a_tensor_is_that_of_llama_cpp(name, shape, outtype, has_output, expected):
    assert type_of(name, shape, outtype, has_output) == expected


@pytest.mark.parametrize(
    ("value", "outtype", "message"),
    [
        (1e5, "f16", r"a\.weight has values up to 1e\+05, outside the range of F16; choose --outtype bf16"),
        (1e8, "q8_0", "outside the range of Q8_0"),
        (np.nan, "f32", "not finite"),
    ],
)
def test_write_gguf_value_that_the_type_cannot_hold_raises(value, outtype, message, tmp_path):
    values = np.full((2, 32), value, np.float32)
    with pytest.raises(ValueError, match=message):
        write_gguf(
            tmp_path / "a.gguf", "llama", {}, {"a.weight": StoredTensor(values.shape, [lambda: values])}, outtype
        )
