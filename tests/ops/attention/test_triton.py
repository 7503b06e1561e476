"""Triton kernels of attention in the interpreter, against the formula in double precision and the reference."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.ops.attention import (
    AttentionLayout,
    ScoreOptions,
    alibi_slopes,
    attention,
    attention_op,
    attention_reference,
    modified_attention_op,
    wide_attention_op,
)
from paddlenlp_ext.ops.attention import triton as module
from paddlenlp_ext.ops.attention.kernels.tile_lists import tile_lists
from paddlenlp_ext.ops.attention.score_options import PLAIN
from paddlenlp_ext.ops.attention.start_rows import start_rows
from paddlenlp_ext.ops.attention.triton import attention_triton
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.ops.attention.formula import formula
from tests.ops.interpreter import Recorder, interpreted, skip_without_triton

skip_without_triton()

SCALE, CAP = 0.8, 1.5
LAYOUTS = {
    "one document": ([[35]], None),
    "packed": ([[3, 17, 1, 18, 2]], None),
    "rows of a batch": ([[9, 9, 2], [20]], None),
    "window": ([[33, 4]], 7),
}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": CAP},
    "sinks": {"sinks": True},
    "linear biases": {"slopes": True},
    "all": {"softcap": CAP, "sinks": True, "slopes": True},
}
COMBINATIONS = {
    **{f"{layout}, all": (*LAYOUTS[layout], OPTIONS["all"]) for layout in LAYOUTS},
    **{f"packed, {name}": (*LAYOUTS["packed"], options) for name, options in OPTIONS.items() if name != "all"},
    "one document, plain": (*LAYOUTS["one document"], {}),
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with interpreted("paddlenlp_ext.ops.attention.kernels.backward"):
        yield


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the kernels on the CPU, in small tiles of different sizes."""
    from paddlenlp_ext.ops.attention.kernels import backward, forward

    launches, other = Recorder(), {"num_warps": 1, "num_stages": 1}
    for table, queries, keys in ((forward.SIZES, 16, 8), (backward.QUERY_SIZES, 8, 16), (backward.KEY_SIZES, 16, 16)):
        monkeypatch.setattr(table, "fixed", {"QUERIES": queries, "KEYS": keys, **other})
    monkeypatch.setattr(backward.DELTA_SIZES, "fixed", {"QUERIES": 32, "num_warps": 1})
    monkeypatch.setattr(module, "launch", launches)
    return launches


def numbers(layout: AttentionLayout, sinks: bool, heads: int = 2, kv_heads: int = 1) -> list[np.ndarray]:
    """Return queries and keys of 5 channels, values of 7, sinks if requested, and the gradient of the output."""
    shape = (len(layout.document_lengths), layout.row_length)
    dims = ((heads, 5), (kv_heads, 5), (kv_heads, 7))
    inputs = [normal(seed, *shape, *dim) for seed, dim in enumerate(dims)]
    return [*inputs, *([2 * normal(7, heads)] if sinks else []), normal(9, *shape, heads, 7)]


def options_of(options: dict, sinks: tuple[paddle.Tensor, ...], heads: int = 2) -> ScoreOptions:
    slopes = alibi_slopes(heads) if "slopes" in options else None
    return ScoreOptions(options.get("softcap"), slopes, sinks[0] if sinks else None)


@pytest.mark.parametrize(("documents", "window", "options"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_attention_triton_matches_the_formula_and_its_gradients(launched, documents, window, options):
    layout = AttentionLayout.from_documents(documents, window)
    *inputs, gradient = numbers(layout, "sinks" in options)

    def run(q, k, v, *sinks):
        return attention_triton(q, k, v, layout, SCALE, None, options_of(options, sinks))

    slopes = options_of(options, ()).slopes
    expected = formula(inputs, gradient, layout, SCALE, 0, slopes, options.get("softcap"))
    assert_all_close(run_both_ways(run, inputs, gradient), expected, atol=1e-5)


def test_attention_triton_with_large_sinks_has_finite_gradients(launched):
    """The last tile of queries is longer than the row: there, exp(sink) exceeds the largest float32."""
    layout = AttentionLayout.from_documents([[35]])
    *inputs, gradient = numbers(layout, True)
    inputs[3] = np.array([100.0, -100.0], np.float32)

    def run(q, k, v, sinks):
        return attention_triton(q, k, v, layout, SCALE, None, ScoreOptions(sinks=sinks))

    assert_all_close(run_both_ways(run, inputs, gradient), formula(inputs, gradient, layout, SCALE), atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_attention_triton_with_prefix_matches_the_formula(launched, window):
    layout = AttentionLayout.from_documents([[5, 20]], window)
    q, _, _, sinks, gradient = numbers(layout, True)
    k, v = normal(1, 1, 3 + layout.row_length, 1, 5), normal(2, 1, 3 + layout.row_length, 1, 7)

    def run(q, k, v, sinks):
        options = ScoreOptions(CAP, alibi_slopes(2), sinks)
        return attention_triton(q, k[:, 3:], v[:, 3:], layout, SCALE, (k[0, :3], v[0, :3]), options)

    expected = formula([q, k, v, sinks], gradient, layout, SCALE, 3, alibi_slopes(2), CAP)
    assert_all_close(run_both_ways(run, [q, k, v, sinks], gradient), expected, atol=1e-5)


@pytest.mark.parametrize(("window", "options"), [(None, {}), (5, {}), (None, OPTIONS["all"])])
def test_attention_triton_of_branches_matches_the_reference(launched, window, options):
    layout = AttentionLayout.from_documents([[14, 9, 17]], window, [[None, 0, 0]])
    *inputs, gradient = numbers(layout, "sinks" in options)
    runs = [
        run_both_ways(
            lambda q, k, v, *sinks, own=own: own(q, k, v, layout, SCALE, None, options_of(options, sinks)),
            inputs,
            gradient,
        )
        for own in (attention_triton, attention_reference)
    ]
    assert_all_close(*runs, atol=1e-5)


def test_attention_triton_of_groups_launches_grids_that_cover_positions_and_heads(launched):
    layout = AttentionLayout.from_documents([[20, 15], [35]])
    *inputs, gradient = numbers(layout, True, 4, 2)

    def run(q, k, v, sinks):
        return attention_triton(q, k, v, layout, SCALE, None, ScoreOptions(sinks=sinks))

    expected = formula(inputs, gradient, layout, SCALE)
    assert_all_close(run_both_ways(run, inputs, gradient), expected, atol=1e-5)
    forward, deltas, sums, queries, keys = launched
    assert launched.names == [
        *("attention_forward_kernel", "attention_deltas_kernel", "column_sums_kernel"),
        *("attention_queries_kernel", "attention_keys_kernel"),
    ]
    assert [each.grid for each in (forward, deltas, queries, keys)] == [(3, 4, 2), (2, 4, 2), (5, 4, 2), (3, 2, 2)]
    assert sums.arguments["partials"].shape == [4, 4]
    sizes = {"length": 35, "num_heads": 4, "group": 2, "outer": SCALE * math.log2(math.e), "PRECISION": "tf32"}
    sizes |= {"HEAD_DIM": 5, "CHANNELS": 16, "VALUE_DIM": 7, "VALUE_CHANNELS": 16, "CAPPED": False, "BIASED": False}
    for each, width in ((forward, 5), (queries, 3), (keys, 3)):
        assert {name: each.arguments[name] for name in sizes} == sizes
        assert each.arguments["indices"].shape == [2, each.grid[0], width] and each.arguments["width"] == width
        assert each.arguments["counts"].shape == [2, each.grid[0], 2]
    assert forward.arguments["counts"].numpy().tolist() == [[[0, 2], [0, 4], [0, 3]], [[0, 2], [2, 4], [0, 5]]]
    tiles = [[each.arguments[name] for name in ("QUERIES", "KEYS")] for each in (forward, queries, keys)]
    assert tiles == [[16, 8], [8, 16], [16, 16]]


def test_attention_triton_in_half_precision_is_close_to_the_formula(launched):
    """Use keys that are slices of longer rows, values in another dtype, and a gradient with transposed strides."""
    layout = AttentionLayout.from_documents([[14, 19]])
    *inputs, gradient = (x.astype("float16") for x in numbers(layout, False, 2, 2))
    inputs[2] = inputs[2].astype("float32")

    def run(q, k, v):
        keys = paddle.concat([q, k], -1)[..., 5:]
        return attention_triton(q, keys, v, layout, 0.4, None, ScoreOptions(CAP)).transpose([0, 2, 1, 3])

    out, *gradients = run_both_ways(run, inputs, gradient.transpose(0, 2, 1, 3).copy())
    assert [x.dtype for x in (out, *gradients)] == [np.float16] * 3 + [np.float32]
    actual = [out.transpose(0, 2, 1, 3), *gradients]
    for one, exact in zip(actual, formula(inputs, gradient, layout, 0.4, softcap=CAP), strict=True):
        assert np.linalg.norm(one - exact) <= 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("frozen", "kernels_of_backward"), [((0, 1, 2), []), ((1, 2, 3), ["queries"]), ((0, 1, 3), ["keys"])]
)
def test_attention_triton_with_frozen_inputs_skips_their_gradients(launched, frozen, kernels_of_backward):
    layout = AttentionLayout.from_documents([[9]])
    *inputs, gradient = numbers(layout, True)

    def run(q, k, v, sinks):
        return attention_triton(q, k, v, layout, SCALE, None, ScoreOptions(sinks=sinks))

    actual = run_both_ways(run, inputs, gradient, frozen)
    expected = formula(inputs, gradient, layout, SCALE)
    assert_all_close(actual, [None if n - 1 in frozen else x for n, x in enumerate(expected)], atol=1e-5)
    walks = [name.split("_")[1] for name in launched.names if name.split("_")[1] in ("queries", "keys")]
    assert walks == kernels_of_backward


def test_attention_triton_without_gradients_launches_the_forward_pass_alone(launched):
    layout = AttentionLayout.from_documents([[9]])
    *inputs, gradient = numbers(layout, False)
    out = attention_triton(*map(paddle.to_tensor, inputs), layout, SCALE)
    np.testing.assert_allclose(out.numpy(), formula(inputs, gradient, layout, SCALE)[0], atol=1e-5)
    assert launched.names == ["attention_forward_kernel"]


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (8, 8)])
@pytest.mark.parametrize(
    ("documents", "window", "parents"),
    [
        ([[50]], None, None),
        ([[3, 41, 1, 17, 40, 2], [104]], None, None),
        ([[50, 54]], 9, None),
        ([[30, 20, 40]], None, [[None, 0, 0]]),
    ],
)
def test_tile_lists_have_the_tiles_of_the_dense_mask(documents, window, parents, sizes):
    layout = AttentionLayout.from_documents(documents, window, parents)
    queries, keys = sizes
    padding = [(0, 0), (0, -layout.row_length % queries), (0, -layout.row_length % keys)]
    mask = np.pad(layout.dense_mask(), padding)
    tiles = mask.reshape(len(mask), mask.shape[1] // queries, queries, -1, keys)
    is_seen, is_full = tiles.any((2, 4)), tiles.all((2, 4))
    for of_keys in (False, True):
        lists = tile_lists(start_rows(layout)[:, 0, :, 0], queries, keys, of_keys)
        seen, full = (x.transpose(0, 2, 1) if of_keys else x for x in (is_seen, is_full))
        assert lists.indices.dtype == lists.counts.dtype == np.int32
        assert lists.counts.shape == (*seen.shape[:2], 2)
        for own in np.ndindex(seen.shape[:2]):
            indices, counts = lists.indices[own], lists.counts[own]
            assert set(indices[: counts[0]]) == set(np.flatnonzero(full[own]))
            assert set(indices[: counts[1]]) == set(np.flatnonzero(seen[own]))


@pytest.mark.parametrize(
    ("op", "capability", "dtype", "backend"),
    [
        (attention_op, (9, 0), paddle.float16, "flashmask"),
        (attention_op, (9, 0), paddle.float32, "triton"),
        (modified_attention_op, (8, 0), paddle.bfloat16, "triton"),
        (modified_attention_op, (7, 5), paddle.float16, "blocks"),
        (wide_attention_op, (9, 0), paddle.bfloat16, "blocks"),
    ],
)
def test_attention_ops_choose_triton_where_flashmask_lacks_something(op, capability, dtype, backend):
    assert op.explain(SimpleNamespace(place=AbsentGpu(capability), dtype=dtype))[0] == backend


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "options", "expected"),
    [
        ("float16", 256, 3, PLAIN, attention_op),
        ("float16", 257, 3, PLAIN, modified_attention_op),
        ("float16", 3, 512, PLAIN, modified_attention_op),
        ("float16", 3, 513, PLAIN, wide_attention_op),
        ("float32", 256, 3, PLAIN, attention_op),
        ("float32", 257, 3, PLAIN, wide_attention_op),
        ("float32", 257, 3, ScoreOptions(softcap=5.0), wide_attention_op),
    ],
)
def test_attention_takes_the_op_for_the_width_of_its_heads(monkeypatch, dtype, head_dim, value_dim, options, expected):
    chosen = []
    for op in (attention_op, modified_attention_op, wide_attention_op):
        monkeypatch.setattr(op, "choose", lambda *_, op=op: chosen.append(op) or (lambda *_: None))
    q, v = paddle.ones([1, 2, 1, head_dim], dtype), paddle.ones([1, 2, 1, value_dim], dtype)
    attention(q, q, v, AttentionLayout.from_documents([[2]]), 0.1, options=options)
    assert chosen == [expected]


def test_attention_of_too_wide_heads_on_a_gpu_names_the_largest_width():
    x = SimpleNamespace(place=AbsentGpu(), dtype=paddle.float32)
    assert (
        "up to 512 channels per head in half precision and 256 in float32" in wide_attention_op.explain(x)[1]["triton"]
    )


def test_attention_triton_of_heads_that_exceed_shared_memory_raises_value_error():
    q, layout = paddle.zeros([1, 2, 1, 257]), AttentionLayout.from_documents([[2]])
    with pytest.raises(ValueError, match=r"heads of 257 channels .* exceed 1024 bytes; use another backend"):
        attention_triton(q, q, q[..., :3], layout, 1.0)
