"""Attention over documents that continue a parent: every backend, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout, attention, attention_reference, flashmask, start_rows
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.gpu import pretend_gpu
from tests.common.marks import needs_cpp

DOCUMENTS = {
    "pair": ([[20, 7, 9]], [[None, 0, 0]]),
    "short and long": ([[130, 70, 1, 12, 1, 1, 4]], [[None, 0, 0, None, 3, 3, None]]),
    "rows of a batch": ([[9, 3, 4], [10, 5, 1]], [[None, 0, 0], [None, 0, None]]),
}
WINDOWS = [None, 1, 8, 1000]
HEADS = (6, 2)
H = 5


def make(layout: AttentionLayout, prefix: int = 0, head_dim: int = H) -> list[np.ndarray]:
    shape, (heads, kv_heads) = (len(layout.document_lengths), layout.row_length), HEADS
    arrays = [normal(seed, *shape, n, head_dim) for seed, n in enumerate((heads, kv_heads, kv_heads))]
    return arrays + ([normal(seed, prefix, kv_heads, head_dim) for seed in (7, 8)] if prefix else [])


def run(arrays: list[np.ndarray], layout: AttentionLayout, backend: str) -> list:
    return run_both_ways(
        lambda q, k, v, *prefix: attention(q, k, v, layout, 0.3, backend, prefix or None),
        arrays,
        normal(9, *arrays[0].shape),
    )


def separately(q, k, v, *prefix, layout: AttentionLayout) -> paddle.Tensor:
    """Compute the attention of each document with a copy of its parent before it."""
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    starts, lengths = layout.documents()
    parts = []
    for start, length, parent in zip(starts, lengths, layout.parents(), strict=True):
        before = np.arange(0) if parent < 0 else np.arange(starts[parent], starts[parent] + lengths[parent])
        index = paddle.to_tensor(np.concatenate([before, np.arange(start, start + length)]))
        alone = AttentionLayout.from_documents([[len(before) + length]], layout.window)
        inputs = (paddle.index_select(x, index, axis=1) for x in (q, k, v))
        parts.append(attention_reference(*inputs, alone, 0.3, prefix or None)[:, len(before) :])
    return paddle.concat(parts, axis=1)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("lengths", "parents"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_attention_reference_of_branches_equals_separate_documents(lengths, parents, window, prefix):
    layout = AttentionLayout.from_documents(lengths, window, parents)
    arrays = make(layout, prefix)
    gradient = normal(9, *arrays[0].shape)
    expected = run_both_ways(
        lambda *inputs: separately(*inputs, layout=layout).reshape(gradient.shape), arrays, gradient
    )
    assert_all_close(run(arrays, layout, "reference"), expected, atol=5e-6)


@pytest.mark.parametrize("backend", ["blocks", pytest.param("cpp", marks=needs_cpp)])
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("lengths", "parents"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_attention_of_branches_matches_the_reference_and_its_gradients(lengths, parents, window, prefix, backend):
    layout = AttentionLayout.from_documents(lengths, window, parents)
    arrays = make(layout, prefix)
    assert_all_close(run(arrays, layout, backend), run(arrays, layout, "reference"), atol=2e-5)


@needs_cpp
@pytest.mark.parametrize("window", [None, 40])
def test_attention_cpp_of_branches_in_bf16_is_within_rounding(window):
    layout = AttentionLayout.from_documents(*DOCUMENTS["short and long"][:1], window, DOCUMENTS["short and long"][1])
    arrays = make(layout, head_dim=16)
    with bf16_matmuls():
        actual = run(arrays, layout, "cpp")
    for one, other in zip(actual, run(arrays, layout, "reference"), strict=True):
        assert np.linalg.norm(one - other) <= 0.02 * np.linalg.norm(other)


@pytest.mark.parametrize("in_bf16", [False, pytest.param(True, marks=needs_cpp)])
@pytest.mark.parametrize("backend", ["reference", "blocks", pytest.param("cpp", marks=needs_cpp)])
def test_attention_of_a_branch_ignores_the_other_branch_to_the_bit(backend, in_bf16):
    layout = AttentionLayout.from_documents([[70, 30, 41]], None, [[None, 0, 0]])
    arrays = make(layout, head_dim=16)
    changed = [array.copy() for array in arrays]
    for array in changed:
        array[:, 70:100] = 7 * normal(5, 1, 30, *array.shape[2:])
    with bf16_matmuls() if in_bf16 else nullcontext():
        one, other = (
            attention(*map(paddle.to_tensor, inputs), layout, 0.3, backend).numpy() for inputs in (arrays, changed)
        )
    np.testing.assert_array_equal(np.delete(one, np.s_[70:100], axis=1), np.delete(other, np.s_[70:100], axis=1))
    assert (one[:, 70:100] != other[:, 70:100]).any()


@pytest.mark.parametrize(("lengths", "parents"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_start_rows_of_branches_describe_the_dense_mask(lengths, parents):
    layout = AttentionLayout.from_documents(lengths, None, parents)
    rows_B1S = start_rows.start_rows(layout)[:, 0, None, :, 0]
    queries_S1, keys_S = np.arange(layout.row_length)[:, None], np.arange(layout.row_length)
    is_visible = (keys_S <= queries_S1) & (queries_S1 < rows_B1S)
    np.testing.assert_array_equal(is_visible, layout.dense_mask())


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize(("lengths", "parents"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_flashmask_attention_of_branches_with_window_copies_the_parents(lengths, parents, prefix, monkeypatch):
    """Replace the kernel with the reference and record its layouts."""
    layout = AttentionLayout.from_documents(lengths, 8, parents)
    arrays, layouts = make(layout, prefix), []

    def record(longer: AttentionLayout) -> np.ndarray:
        layouts.append(longer)
        return np.zeros(1, np.int32)

    def kernel(q, k, v, startend_row_indices, causal, softmax_scale):
        return attention_reference(q, k, v, layouts[-1], q.shape[-1] ** -0.5)

    monkeypatch.setattr(start_rows, "start_rows", record)
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(flashmask.F, "flashmask_attention", kernel)
    q, k, v, *before = map(paddle.to_tensor, arrays)
    actual = flashmask.flashmask_attention(q, k, v, layout, 0.3, tuple(before) or None)
    expected = separately(q, k, v, *before, layout=layout).reshape(q.shape)
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=0, atol=2e-6)


def test_attention_layout_counts_positions_of_branches_from_their_parent():
    layout = AttentionLayout.from_documents([[3, 2, 1], [4, 2]], None, [[None, 0, 0], [None, None]])
    assert layout.positions().tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 2, 3, 0, 1]]
    assert layout.parents().tolist() == [-1, 0, 0, -1, -1]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[None, 0]], r"has \[2\] entries per row, but the rows have \[3\] documents"),
        ([[None, 0, 1]], "document 2 of row 0 continues document 1, but must continue .* without a parent [(]0[)]"),
        ([[0, None, 1]], "document 0 of row 0 continues document 0"),
        ([[None, None, 0]], "document 2 of row 0 continues document 0"),
    ],
)
def test_attention_layout_with_invalid_parents_raises_value_error(parents, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayout.from_documents([[3, 2, 1]], None, parents)
