"""Gated delta rule: norms of queries and keys. test_chunked_recurrence.py has the other tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from tests.common.marks import backends_of
from tests.common.recurrences import output_gradients, relative_error, run
from tests.ops.gated_delta_rule import stepwise


@pytest.mark.parametrize("backend", backends_of(stepwise.op))
@pytest.mark.parametrize("lengths", [[70], [1]])
def test_gated_delta_rule_does_not_depend_on_the_norms_of_queries_and_keys(backend, lengths):
    layout = AttentionLayout.from_documents([lengths])
    inputs = stepwise.random_inputs(layout, (2, 4, 20, 32))
    longer = dataclasses.replace(inputs, q=inputs.q * 8, k=inputs.k * 0.25)
    (o, final, gradients), (own_o, own_final, own_gradients) = (
        run(stepwise, backend, each, layout, output_gradients(inputs)) for each in (inputs, longer)
    )
    assert max(relative_error(own_o, o), relative_error(own_final, final)) < 1e-5
    assert relative_error(own_gradients.q * 8, gradients.q) < 1e-5
    assert relative_error(own_gradients.k * 0.25, gradients.k) < 1e-5
    along = (gradients.q * inputs.q).sum(-1)
    assert np.abs(along).max() < 1e-4 * np.abs(gradients.q).max()
