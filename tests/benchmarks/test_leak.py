"""Leak of packs, measured on sums over earlier positions, which do or do not pass the border of a document."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.leak import LENGTHS, Pass, measure_leak

VALUES = np.random.default_rng(1).standard_normal((97, 5)).astype(np.float32)


def run_with(shared: bool):
    """Return a function that sums values over the earlier positions of the pack if `shared`, else of the document."""

    def run(documents):
        groups = [np.concatenate(documents)] if shared else documents
        sums = np.concatenate([np.cumsum(VALUES[group], axis=0) for group in groups])
        return Pass(logits=sums, embeddings=np.ones_like(sums), weights={"sum": sums.sum(axis=0)})

    return run


def test_separate_documents_have_no_leak():
    found = measure_leak(run_with(shared=False), len(VALUES))
    assert found["logits"] == 0 and found["gradient"] < 1e-6 and found["changed_bits"] == 0
    assert found["bits"] == 32 * 2 * 5 * (sum(LENGTHS) - LENGTHS[1])


def test_leak_is_measured_in_logits_gradients_and_bits():
    found = measure_leak(run_with(shared=True), len(VALUES))
    assert found["logits"] > 0.1 and found["gradient"] > 0.1
    # Only the documents after the changed one read it; embedding gradients are constant.
    assert 0 < found["changed_bits"] < 32 * 5 * sum(LENGTHS[2:])


@pytest.mark.parametrize("part", ["logits", "embeddings"])
def test_a_single_changed_value_is_counted(part):
    """Change the first value of the pack in the last pass, which has the changed neighbour."""
    passes = []

    def run(documents):
        found = run_with(shared=False)(documents)
        passes.append(found)
        if len(passes) == 2 + len(LENGTHS):
            getattr(found, part)[0, 0] = np.nextafter(getattr(found, part)[0, 0], np.float32(9))
        return found

    assert 1 <= measure_leak(run, len(VALUES))["changed_bits"] < 32
