"""Requirements of the PEFT methods that change decoder layers, not linear layers, over every kind of decoder layer."""

from __future__ import annotations

import pytest

from tests.peft import test_conformance as conformance

METHODS = ("adapter", "ln_tuning", "p_tuning", "prefix_tuning", "prompt_tuning", "reft")


@pytest.mark.parametrize("family", ["sandwich", "parallel", "sinks"])
@pytest.mark.parametrize("switch", METHODS)
def test_kv_cache_decoding_over_other_decoder_layers_matches_full_forward(switch: str, family: str):
    """Check norms on both sides, parallel sublayers, and sinks: training, full passes and cached ones."""
    conformance.test_kv_cache_decoding_matches_full_forward(switch, family)
