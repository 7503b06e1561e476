"""Embedding lookup: values, gradients and invalid ids."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.embedding import embedding, embedding_cpp, embedding_reference
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

CPP = pytest.param(embedding_cpp, marks=needs_cpp)


@pytest.mark.parametrize("implementation", [embedding, CPP, embedding_reference])
@pytest.mark.parametrize("width", [1, 16, 37, 300])
@pytest.mark.parametrize("ids", [[3], [[0, 10, 3], [3, 3, 9]], np.arange(2000).reshape(1, -1) % 11])
def test_embedding_of_bf16_table_returns_float32_rows(implementation, width, ids):
    table = paddle.to_tensor(normal(1, 11, width)).astype("bfloat16")
    rows = implementation(table, paddle.to_tensor(ids))
    assert rows.dtype == paddle.float32
    np.testing.assert_array_equal(rows.numpy(), table.astype("float32").numpy()[np.asarray(ids)])


@needs_cpp
@pytest.mark.parametrize("outside", [-1, 11])
def test_embedding_with_id_outside_table_raises_value_error(outside):
    table = paddle.zeros([11, 4], "bfloat16")
    with pytest.raises(ValueError, match=f"{outside}.* 11 rows"):
        embedding(table, paddle.to_tensor([0, outside]))


def test_embedding_of_trainable_table_returns_its_gradient():
    table = paddle.to_tensor(normal(1, 5, 3), stop_gradient=False)
    embedding(table, paddle.to_tensor([1, 1, 4])).sum().backward()
    np.testing.assert_array_equal(table.grad.numpy(), np.array([0, 2, 0, 0, 1])[:, None] * np.ones([1, 3]))
