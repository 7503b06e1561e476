"""Kimi delta rule: stiff systems, blocks of a chunk, and decays. test_chunked_recurrence.py has the other tests."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from tests.common.marks import backends_of
from tests.common.recurrences import check, output_gradients, relative_error, run
from tests.ops.gated_delta_rule import stepwise as gated_delta_rule
from tests.ops.kimi_delta_rule import stepwise

each_backend = pytest.mark.parametrize("backend", backends_of(stepwise.op))


@each_backend
def test_kimi_delta_rule_with_equal_keys_solves_a_stiff_system(backend):
    """Test keys and strengths for which the powers of A reach 3432, so that sums of powers lose three digits."""
    layout = AttentionLayout.from_documents([[64]])
    inputs = stepwise.random_inputs(layout, (2, 2, 10, 6))
    inputs.k[:], inputs.decay[:], inputs.beta[:] = inputs.k[:1], -1e-3, 0.99
    check(stepwise, backend, inputs, layout, 2e-5)


@each_backend
@pytest.mark.parametrize("length", [2, 16, 17, 33, 63])
def test_kimi_delta_rule_with_a_part_of_a_block_equals_the_stepwise_definition(backend, length):
    layout = AttentionLayout.from_documents([[length]])
    check(stepwise, backend, stepwise.random_inputs(layout, (2, 2, 18, 17)), layout, 1e-5)


@each_backend
def test_kimi_delta_rule_with_fast_and_slow_channels_does_not_overflow(backend):
    """Test sums of decays down to -6400 in a chunk; the exponential of the negative of a sum would overflow."""
    layout = AttentionLayout.from_documents([[130]])
    inputs = stepwise.random_inputs(layout, (1, 1, 16, 16))
    inputs.decay[:, :, ::2], inputs.decay[:, :, 1::2] = -100, -1e-4
    check(stepwise, backend, inputs, layout, 1e-5)


@each_backend
def test_kimi_delta_rule_with_equal_decays_in_a_head_is_the_gated_delta_rule(backend):
    layout = AttentionLayout.from_documents([[70, 5, 1]], document_parents=[[None, 0, None]])
    gated = gated_delta_rule.random_inputs(layout, (2, 2, 20, 32))
    inputs = stepwise.Inputs(**{**gated.__dict__, "decay": gated.decay[:, :, None].repeat(20, axis=2)})
    of_outputs = output_gradients(gated)
    o, final, gradients = run(stepwise, backend, inputs, layout, of_outputs)
    expected_o, expected_final, expected = run(gated_delta_rule, backend, gated, layout, of_outputs)
    gradients.decay = gradients.decay.sum(-1)
    assert max(relative_error(o, expected_o), relative_error(final, expected_final)) < 1e-5
    for name, x in gradients.__dict__.items():
        assert relative_error(x, getattr(expected, name)) < 1e-5, name


@each_backend
def test_kimi_delta_rule_does_not_depend_on_the_norms_of_queries_and_keys(backend):
    layout = AttentionLayout.from_documents([[70]])
    inputs = stepwise.random_inputs(layout, (2, 2, 20, 32))
    longer = stepwise.Inputs(**{**inputs.__dict__, "q": inputs.q * 8, "k": inputs.k * 0.25})
    (o, _, gradients), (own_o, _, own) = (
        run(stepwise, backend, each, layout, output_gradients(inputs)) for each in (inputs, longer)
    )
    assert relative_error(own_o, o) < 1e-5
    assert relative_error(own.q * 8, gradients.q) < 1e-5
    assert relative_error(own.k * 0.25, gradients.k) < 1e-5
    along = (gradients.k * inputs.k).sum(-1)
    assert np.abs(along).max() < 1e-4 * np.abs(gradients.k).max()
