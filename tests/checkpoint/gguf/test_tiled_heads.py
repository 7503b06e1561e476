"""Order of value heads in GGUF files of gated delta nets."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.gguf.tiled_heads import HeadSizes, column_order, row_order
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.sharding_spec import Shard

LAYER = "model.layers.1.linear_attn"
SIZES = {"ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 1, "ssm.inner_size": 8}
"""Two key heads of one channel, each with two value heads of two channels."""
METADATA = {f"qwen35.{key}": value for key, value in SIZES.items()}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("A_log", [0, 2, 1, 3]),
        ("in_proj_b.weight", [0, 2, 1, 3]),
        ("in_proj_z.weight", [0, 1, 4, 5, 2, 3, 6, 7]),
        ("conv1d.weight", [0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11]),
    ],
)
def test_row_order_repeats_the_key_heads(name, order):
    assert row_order(f"{LAYER}.{name}", HeadSizes(2, 4, 1, 2)).tolist() == order
    assert column_order(f"{LAYER}.{name}", HeadSizes(2, 4, 1, 2)) is None


@pytest.mark.parametrize("name", ["linear_attn.norm.weight", "mlp.up_proj.weight", "self_attn.q_proj.weight"])
def test_row_order_of_other_tensors_is_unchanged(name):
    assert row_order(f"model.layers.0.{name}", HeadSizes(2, 4, 1, 2)) is None


def test_gguf_weights_of_gated_delta_nets_group_the_value_heads(write_gguf):
    columns = np.arange(24, dtype=np.float32).reshape(3, 8)
    kernel = np.arange(24, dtype=np.float32).reshape(12, 2)
    tensors = {"blk.1.ssm_out.weight": columns, "blk.1.ssm_conv1d.weight": kernel}
    source = open_weights(write_gguf(METADATA, tensors, "qwen35"))
    read = source.read(f"{LAYER}.out_proj.weight")
    assert np.array_equal(read, columns[:, [0, 1, 4, 5, 2, 3, 6, 7]])
    assert np.array_equal(source.read(f"{LAYER}.out_proj.weight", shard=Shard(1, 4, 8, 8)), read[:, 4:])
    assert source.shape(f"{LAYER}.conv1d.weight") == (12, 1, 2)
    expected = kernel[[0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11], None]
    assert np.array_equal(source.read(f"{LAYER}.conv1d.weight"), expected)


def test_gguf_weights_of_damaged_head_sizes_raise(write_gguf):
    tensors = {"blk.1.ssm_alpha.weight": np.zeros((3, 2), np.float32)}
    with pytest.raises(
        ValueError, match=r"axis 0 of .*in_proj_a\.weight has the size 3, but the heads have 4 channels"
    ):
        open_weights(write_gguf(METADATA, tensors, "qwen35")).read(f"{LAYER}.in_proj_a.weight")
    with pytest.raises(ValueError, match=r"ssm\.time_step_rank 3 and ssm\.group_count 2 are not multiples"):
        open_weights(write_gguf({**METADATA, "qwen35.ssm.time_step_rank": 3}, tensors, "qwen35"))
