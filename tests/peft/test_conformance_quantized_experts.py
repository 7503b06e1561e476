"""Every PEFT method over a model with quantized experts, and some over quantized latent attention."""

from __future__ import annotations

import pytest

from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.peft import test_conformance_quantized as conformance


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_merge_and_unload_over_quantized_experts_keeps_logits(switch: str):
    conformance.test_merge_and_unload_over_quantized_base_keeps_logits(switch, "nf4", "experts")


@pytest.mark.parametrize("switch", ["lora", "use_dora", "loftq", "oft", "ia3", "prefix_tuning"])
def test_merge_and_unload_over_quantized_latent_attention_keeps_logits(switch: str):
    conformance.test_merge_and_unload_over_quantized_base_keeps_logits(switch, "int8", "latent")
