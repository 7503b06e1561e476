"""Configurations, data and tables of the whole-model benchmark, which need neither PyTorch nor a GPU."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.triton_table import configurations, largest_difference, markdown, token_batches


def test_configurations_add_one_group_at_a_time_and_leave_one_out():
    assert configurations(["a", "b", "c"]) == {
        "none": (),
        "+ a": ("a",),
        "+ b": ("a", "b"),
        "+ c": ("a", "b", "c"),
        "all without a": ("b", "c"),
        "all without b": ("a", "c"),
        "all without c": ("a", "b"),
    }


def test_largest_difference_ignores_the_sign_and_keeps_nan():
    assert largest_difference([1.0, 2.0, 3.0], [1.0, 2.5, 2.75]) == 0.5
    assert math.isnan(largest_difference([1.0, math.nan], [1.0, 2.0]))


def test_markdown_writes_small_differences_with_an_exponent():
    assert markdown(["ms", "difference"], {"none": [1234.5, 0.0], "+ a": [7, 4.76837e-7]}).splitlines() == [
        "| kernels | ms | difference |",
        "| --- | --- | --- |",
        "| none | 1,234.5 | 0 |",
        "| + a | 7 | 4.8e-07 |",
    ]


def test_markdown_writes_text_as_it_is():
    assert (
        markdown(["ms", "difference"], {"none": ["out of memory", ""]}).splitlines()[-1]
        == "| none | out of memory |  |"
    )


def test_token_batches_are_equal_in_every_call_and_can_be_learned():
    ids = token_batches(4, 2, 200, 50)
    assert ids.shape == (4, 2, 200) and ids.min() >= 0 and ids.max() < 50
    np.testing.assert_array_equal(ids, token_batches(4, 2, 200, 50))
    pairs = np.stack([ids[..., :-1].ravel(), ids[..., 1:].ravel()], axis=1)
    most_common = [np.bincount(pairs[pairs[:, 0] == token, 1]).max() for token in np.unique(pairs[:, 0])]
    assert sum(most_common) > 0.5 * len(pairs)
