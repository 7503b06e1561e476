"""Arguments of the FlashMask kernel, checked without a GPU."""

from __future__ import annotations

import inspect

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddlenlp_ext.ops.attention import flashmask
from paddlenlp_ext.ops.attention.layout import AttentionLayout


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("documents", [[[7]], [[3, 1, 6], [10]]])
def test_flashmask_start_rows_describe_the_dense_mask(documents, window):
    layout = AttentionLayout.from_documents(documents, window)
    rows_B1S1 = flashmask.start_rows(layout)
    assert rows_B1S1.dtype == np.int32 and rows_B1S1.shape == (len(documents), 1, layout.row_length, 1)
    queries_S1, keys_S = np.arange(layout.row_length)[:, None], np.arange(layout.row_length)
    is_visible = (keys_S <= queries_S1) & (queries_S1 < rows_B1S1[:, 0, None, :, 0])
    np.testing.assert_array_equal(is_visible, layout.dense_mask())


def test_flashmask_attention_calls_the_kernel_by_its_signature(monkeypatch: pytest.MonkeyPatch):
    signature = inspect.signature(F.flashmask_attention)
    calls = []

    def record_call(*args: object, **kwargs: object) -> paddle.Tensor:
        calls.append(signature.bind(*args, **kwargs))
        return paddle.zeros([1])

    monkeypatch.setattr(F, "flashmask_attention", record_call)
    layout = AttentionLayout.from_documents([[3, 2]])
    q, k = paddle.ones([1, 5, 4, 16]), paddle.ones([1, 5, 2, 16])
    flashmask.flashmask_attention(q, k, k, layout, 0.25)
    flashmask.flashmask_attention(q, k, k, layout, 0.5)

    plain, scaled = (call.arguments for call in calls)
    assert plain["causal"] is True and plain["startend_row_indices"].numpy().ravel().tolist() == [3, 3, 3, 5, 5]
    assert plain["startend_row_indices"] is scaled["startend_row_indices"], "the mask must be computed once per layout"
    assert float(plain["query"].max()) == 1.0
    assert float(scaled["query"].max()) == 2.0, (
        "the kernel scales by 1/sqrt(16); queries must carry the rest of the scale"
    )


def test_flashmask_attention_pads_narrow_values(monkeypatch: pytest.MonkeyPatch):
    layout = AttentionLayout.from_documents([[5]])
    q, v = paddle.ones([1, 5, 2, 16]), paddle.ones([1, 5, 2, 9])
    seen = []
    monkeypatch.setattr(F, "flashmask_attention", lambda query, key, value, **options: seen.append(value) or value)
    assert flashmask.flashmask_attention(q, q, v, layout, 0.25).tolist() == v.tolist()
    assert seen[0].shape == q.shape and float(seen[0][..., 9:].abs().max()) == 0
