"""State space duality: groups of heads. tests/ops/gated_delta_rule/test_chunked_recurrence.py has the other tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paddlenlp_ext.ops.attention import AttentionLayout
from tests.common.marks import backends_of
from tests.common.recurrences import output_gradients, relative_error, run
from tests.ops.state_space_duality import stepwise


@pytest.mark.parametrize("backend", backends_of(stepwise.op))
@pytest.mark.parametrize("heads", [3, 5, 9])
def test_heads_of_a_group_equal_heads_with_copies_of_b_and_c(backend, heads):
    """Test numbers of heads that one task of the C++ backend computes, and more."""
    layout = AttentionLayout.from_documents([[70, 5]])
    grouped = stepwise.random_inputs(layout, (2, 2 * heads, 20, 32))
    copies = dataclasses.replace(grouped, c=grouped.c.repeat(heads, axis=1), b=grouped.b.repeat(heads, axis=1))
    of_outputs = output_gradients(grouped)
    (y, final, gradients), (own_y, own_final, own_gradients) = (
        run(stepwise, backend, inputs, layout, of_outputs) for inputs in (grouped, copies)
    )
    assert max(relative_error(y, own_y), relative_error(final, own_final)) < 5e-6
    for name in "cb":
        of_copies = getattr(own_gradients, name).reshape(75, 2, heads, 20).sum(2, dtype=np.float64)
        assert relative_error(getattr(gradients, name), of_copies) < 5e-6
