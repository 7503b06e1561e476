"""Requirements of the PEFT methods that change decoder layers, not linear layers, over every kind of decoder layer."""

from __future__ import annotations

import pytest

from tests.peft import test_conformance as conformance
from tests.peft.adapted_case import EVERY_METHOD, Case, CaseKey, case_keys

METHODS = ("adapter", "ln_tuning", "p_tuning", "prefix_tuning", "prompt_tuning", "reft")
CASES = case_keys({name: EVERY_METHOD[name] for name in METHODS}, ["sandwich", "parallel", "sinks"])


@pytest.mark.parametrize("key", CASES, ids=str)
def test_kv_cache_decoding_over_other_decoder_layers_matches_full_forward(key: CaseKey):
    """Check norms on both sides, parallel sublayers, and sinks: training, full passes and cached ones."""
    conformance.test_kv_cache_decoding_matches_full_forward(Case(key))
