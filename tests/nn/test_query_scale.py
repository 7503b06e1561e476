"""Scale of queries by position."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.nn.query_scale import QueryScale


def test_query_scale_grows_at_multiples_of_the_context():
    positions = paddle.to_tensor([[0, 4, 5, 9], [10, 14, 15, 1000]])
    scales = QueryScale(beta=0.3, context=5)(positions)
    assert scales is not None and scales.shape == [2, 4, 1, 1]
    contexts = np.array([[0, 0, 1, 1], [2, 2, 3, 200]])
    np.testing.assert_allclose(scales.numpy()[..., 0, 0], 1 + 0.3 * np.log1p(contexts), rtol=1e-6)


def test_query_scale_within_the_context_is_none():
    assert QueryScale(beta=0.3, context=5)(paddle.to_tensor([[0, 4]])) is None
