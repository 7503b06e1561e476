"""C++ attention against the reference, forward and backward, around its block size of 64 and vector size of 16."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.attention import AttentionLayout, attention
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.cpp.library import function, pointer, set_threads
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

pytestmark = needs_cpp

LAYOUTS = {
    "one token": ([[1]], None),
    "vectors and blocks, more and less": ([[16, 17, 63, 64, 65, 1, 130]], None),
    "rows of a batch": ([[29, 70, 2], [101]], None),
    "window within a vector": ([[150, 33]], 5),
    "window across blocks": ([[200]], 75),
    "window of a block": ([[64, 193]], 64),
    "window of one": ([[67]], 1),
    "window longer than the documents": ([[9, 70]], 1000),
}
SHAPES = {
    "grouped": (6, 2, 16),
    "one key head, narrow values": (3, 1, 80, 48),
    "as many key heads, wide values": (2, 2, 32, 43),
    "odd head": (4, 2, 21),
}
"""Query heads, key heads, channels of queries and keys, channels of values."""


def make(
    layout: AttentionLayout, heads: int, kv_heads: int, head_dim: int, value_dim: int | None = None, prefix: int = 0
) -> list[np.ndarray]:
    shape, value_dim = (len(layout.document_lengths), layout.row_length), value_dim or head_dim
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    arrays = [normal(seed, *shape, *size) for seed, size in enumerate(sizes)]
    before = [normal(seed, prefix, *size) for seed, size in zip((7, 8), sizes[1:], strict=True)] if prefix else []
    return arrays + before


def run(arrays: list[np.ndarray], layout: AttentionLayout, backend: str, frozen: tuple[int, ...] = ()) -> list:
    def op(q, k, v, *prefix):
        return attention(q, k, v, layout, 0.3, backend, prefix or None)

    return run_both_ways(op, arrays, normal(9, *arrays[0].shape[:3], arrays[2].shape[3]), frozen)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_attention_cpp_matches_the_reference_and_its_gradients(documents, window, shape):
    layout = AttentionLayout.from_documents(documents, window)
    arrays = make(layout, *shape)
    assert_all_close(run(arrays, layout, "cpp"), run(arrays, layout, "reference"), atol=2e-5)


@pytest.mark.parametrize("prefix", [1, 20, 100])
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_attention_cpp_with_prefix_matches_the_reference_and_its_gradients(documents, window, prefix):
    layout = AttentionLayout.from_documents(documents, window)
    arrays = make(layout, 6, 2, 16, 24, prefix)
    assert_all_close(run(arrays, layout, "cpp"), run(arrays, layout, "reference"), atol=3e-5)


@pytest.mark.parametrize(
    "shape", [(6, 2, 16, 16), SHAPES["one key head, narrow values"]], ids=["grouped", "one key head"]
)
@pytest.mark.parametrize("prefix", [0, 7])
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_attention_cpp_in_bf16_is_within_rounding(documents, window, prefix, shape):
    layout = AttentionLayout.from_documents(documents, window)
    arrays = make(layout, *shape, prefix)
    with bf16_matmuls():
        actual = run(arrays, layout, "cpp")
    exact = run(arrays, layout, "reference")
    # Each of up to three factors is rounded by up to 2^-9, and a gradient may be a small difference of large terms.
    largest_norm = max(np.linalg.norm(x) for x in exact)
    for one, other in zip(actual, exact, strict=True):
        assert np.linalg.norm(one - other) <= 6 * 2.0**-9 * max(np.linalg.norm(other), 0.1 * largest_norm)
    is_built_for_avx512 = "-mno-avx512f" not in os.environ.get("CXX", "")
    if is_built_for_avx512 and "avx512_bf16" in Path("/proc/cpuinfo").read_text():
        assert np.abs(actual[0] - exact[0]).max() > 1e-4, "nothing was rounded"


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2), (0, 3, 4), (0, 1, 2)])
def test_attention_cpp_with_frozen_inputs_returns_only_needed_gradients(frozen, in_bf16):
    layout = AttentionLayout.from_documents([[70, 9]])
    arrays = make(layout, 4, 2, 16, prefix=3)
    with bf16_matmuls() if in_bf16 else nullcontext():
        actual = run(arrays, layout, "cpp", frozen)
    assert_all_close(actual, run(arrays, layout, "reference", frozen), atol=0.05 if in_bf16 else 1e-5)


@pytest.mark.parametrize("in_bf16", [False, True])
def test_attention_cpp_reads_no_other_document(in_bf16):
    """Check that a NaN in another document has no effect, and that one in the document itself propagates."""
    layout = AttentionLayout.from_documents([[70, 65, 90]])
    arrays = make(layout, 4, 2, 16)
    changed = [array.copy() for array in arrays]
    for array in changed:
        array[:, 70:135] = np.nan
    with bf16_matmuls() if in_bf16 else nullcontext():
        runs = [run(each, layout, "cpp") for each in (arrays, changed)]
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one[:, :70], other[:, :70])
        np.testing.assert_array_equal(one[:, 135:], other[:, 135:])
        assert np.isnan(other[:, 70:135]).all()


def test_attention_cpp_with_large_scores_stays_finite():
    layout = AttentionLayout.from_documents([[90]], window=70)
    arrays = [array * factor for array, factor in zip(make(layout, 2, 1, 16), (60, 60, 1), strict=True)]
    actual = run(arrays, layout, "cpp")
    assert all(np.isfinite(array).all() for array in actual)
    np.testing.assert_allclose(actual[0], run(arrays, layout, "reference")[0], rtol=0, atol=2e-3)


def test_attention_cpp_reads_strided_tensors():
    layout = AttentionLayout.from_documents([[40]])
    arrays = make(AttentionLayout.from_documents([[50]]), 4, 2, 16)

    def sliced(backend):
        return run_both_ways(
            lambda q, k, v: attention(q[:, 10:], k[:, 10:], v[:, 10:], layout, 0.3, backend),
            arrays,
            normal(9, 1, 40, 4, 16),
        )

    assert_all_close(sliced("cpp"), sliced("reference"), atol=2e-5)


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("documents", [[[200]], [[70] * 12]], ids=["few tasks", "many tasks"])
def test_attention_cpp_with_one_and_two_threads_gives_same_bits(documents, in_bf16):
    layout = AttentionLayout.from_documents(documents)
    arrays = make(layout, 6, 2, 16, prefix=5)
    runs = []
    try:
        for threads in (1, 2, 2):
            set_threads(threads)
            with bf16_matmuls() if in_bf16 else nullcontext():
                runs.append(run(arrays, layout, "cpp"))
    finally:
        set_threads(threads_per_process())
    for other in runs[1:]:
        for one, again in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(one, again)


def test_attention_cpp_exp2_has_relative_error_below_3e_7():
    x = np.concatenate([np.linspace(-126, 20, 20000), -np.geomspace(1e-8, 126, 20000)]).astype(np.float32)
    x_tensor, out = paddle.to_tensor(x), paddle.empty([x.size])
    function("attention_exp2")(pointer(x_tensor), pointer(out), x.size)
    np.testing.assert_allclose(out.numpy(), np.exp2(x.astype(np.float64)), rtol=3e-7, atol=0)
    edges = paddle.to_tensor(np.array([-np.inf, -1e9, -126.5, np.nan] + [0.0] * 12, np.float32))
    function("attention_exp2")(pointer(edges), pointer(out), 16)
    np.testing.assert_array_equal(out.numpy()[:5], [0, 0, 0, np.nan, out.numpy()[4]])


@pytest.mark.parametrize("wrong", [[(9, 2, 16)], [(9, 2, 16), (9, 2, 15)], [(10, 2, 16), (10, 3, 16)]])
def test_attention_cpp_with_mismatched_shapes_raises_assertion_error(wrong):
    layout = AttentionLayout.from_documents([[10]])
    shapes = [(10, 4, 16), (10, 2, 16), (10, 2, 16)]
    for place, shape in enumerate(wrong, start=3 - len(wrong)):
        shapes[place] = shape
    tensors = [paddle.to_tensor(normal(1, 1, *shape)) for shape in shapes]
    with pytest.raises(AssertionError, match=r"queries|keys"):
        attention(*tensors, layout, 0.3, "cpp")
    with pytest.raises(AssertionError, match="11 positions"):
        attention(*tensors[:1] * 3, AttentionLayout.from_documents([[11]]), 0.3, "cpp")
