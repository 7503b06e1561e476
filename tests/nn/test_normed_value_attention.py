"""Attention with norms of the values, with and without a value projection."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.attention import AttentionInputs, AttentionShape, QKNorm
from paddlenlp_ext.nn.normed_value_attention import NormedValueAttention
from paddlenlp_ext.ops.attention import AttentionLayout
from tests.common.arrays import normal

HEADS, KV_HEADS, HEAD_DIM, EPSILON = 4, 2, 6, 0.1


@pytest.mark.parametrize("has_v_proj", [True, False])
def test_attention_of_one_position_returns_normed_values_of_its_source(has_v_proj):
    """A document of one position attends to itself only, so the result is its value."""
    shape = AttentionShape(
        hidden_size=10,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        has_v_proj=has_v_proj,
        qk_norm=QKNorm(),
        norm_epsilon=EPSILON,
        rotates=False,
    )
    attention = NormedValueAttention(shape, 0)
    assert hasattr(attention, "v_proj") == has_v_proj
    assert attention.input_names == (("q_proj", "k_proj", "v_proj") if has_v_proj else ("q_proj", "k_proj"))
    for index, parameter in enumerate(attention.parameters()):
        parameter.set_value(paddle.to_tensor(normal(index, *parameter.shape)))

    x_BSD = normal(9, 1, 3, 10)
    inputs = AttentionInputs([], {None: AttentionLayout.from_documents([[1, 1, 1]])})
    found = attention(paddle.to_tensor(x_BSD), inputs).numpy()

    source = (attention.v_proj if has_v_proj else attention.k_proj).weight.numpy()
    values = (x_BSD @ source.T).reshape(1, 3, KV_HEADS, HEAD_DIM)
    values = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON)
    values = values.repeat(HEADS // KV_HEADS, axis=2).reshape(1, 3, -1)
    np.testing.assert_allclose(found, values @ attention.o_proj.weight.numpy().T, rtol=0, atol=1e-5)
