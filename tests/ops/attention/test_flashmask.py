"""Arguments of the FlashMask kernel, checked without a GPU."""

from __future__ import annotations

import inspect

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddlenlp_ext.ops.attention import flashmask
from paddlenlp_ext.ops.attention.document_layout import AttentionLayout
from paddlenlp_ext.ops.attention.start_rows import start_rows
from tests.common.gpu import pretend_gpu


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("documents", [[[7]], [[3, 1, 6], [10]]])
def test_start_rows_describe_the_dense_mask(documents, window):
    layout = AttentionLayout.from_documents(documents, window)
    rows_B1S1 = start_rows(layout)
    assert rows_B1S1.dtype == np.int32 and rows_B1S1.shape == (len(documents), 1, layout.row_length, 1)
    queries_S1, keys_S = np.arange(layout.row_length)[:, None], np.arange(layout.row_length)
    is_visible = (keys_S <= queries_S1) & (queries_S1 < rows_B1S1[:, 0, None, :, 0])
    np.testing.assert_array_equal(is_visible, layout.dense_mask())


@pytest.mark.parametrize(("capability", "largest_query", "softmax_scale"), [((8, 0), 2.0, None), ((9, 0), 1.0, 0.5)])
def test_flashmask_attention_calls_the_kernel_by_its_signature(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], largest_query: float, softmax_scale: float | None
):
    """The kernel before Hopper scales by 1/sqrt(16): queries must carry the rest of the scale."""
    signature, calls = inspect.signature(F.flashmask_attention), []

    def record_call(*args: object, **kwargs: object) -> paddle.Tensor:
        calls.append(signature.bind(*args, **kwargs))
        return paddle.zeros([1])

    pretend_gpu(monkeypatch, capability)
    monkeypatch.setattr(F, "flashmask_attention", record_call)
    layout = AttentionLayout.from_documents([[3, 2]])
    q, k = paddle.ones([1, 5, 4, 16]), paddle.ones([1, 5, 2, 16])
    flashmask.flashmask_attention(q, k, k, layout, 0.25)
    flashmask.flashmask_attention(q, k, k, layout, 0.5)

    plain, scaled = (call.arguments for call in calls)
    assert plain["causal"] is True and plain["startend_row_indices"].numpy().ravel().tolist() == [3, 3, 3, 5, 5]
    assert plain["startend_row_indices"] is scaled["startend_row_indices"], "the mask must be computed once per layout"
    assert float(plain["query"].max()) == 1.0
    assert float(scaled["query"].max()) == largest_query and scaled["softmax_scale"] == softmax_scale


@pytest.mark.parametrize(
    ("capability", "deterministic", "head_dim", "version"),
    [
        ((8, 0), False, 128, 2),
        ((9, 0), False, 256, 3),
        ((9, 0), True, 128, 3),
        ((9, 0), True, 136, 2),
        ((10, 0), False, 64, 2),
    ],
)
def test_kernel_version_follows_gpu_and_determinism(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], deterministic: bool, head_dim: int, version: int
):
    pretend_gpu(monkeypatch, capability, deterministic)
    assert flashmask.kernel_version(head_dim) == version


def test_kernel_version_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch):
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setenv("FLAGS_flash_attn_version", "2")
    assert flashmask.kernel_version(64) == 2


@pytest.mark.parametrize(("head_dim", "value_dim", "padded"), [(16, 9, 16), (5, 5, 8), (8, 12, 16)])
def test_flashmask_attention_pads_to_one_multiple_of_8(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int, padded: int
):
    pretend_gpu(monkeypatch)
    layout = AttentionLayout.from_documents([[5]])
    q, v = paddle.ones([1, 5, 2, head_dim]), paddle.ones([1, 5, 2, value_dim])
    seen = []
    monkeypatch.setattr(
        F, "flashmask_attention", lambda query, key, value, **options: seen.extend([key, value]) or value
    )
    assert flashmask.flashmask_attention(q, q, v, layout, 0.25).tolist() == v.tolist()
    assert [x.shape for x in seen] == [[1, 5, 2, padded]] * 2
    assert float(seen[0].sum()) == q.size and float(seen[1].sum()) == v.size, "the padding must be zeros"
