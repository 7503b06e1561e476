"""Requirements of every PEFT method over latent attention: those that its projections or its cache could break."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.peft import test_conformance as conformance

OF_PREFIXES = ("p_tuning", "prefix_tuning", "prompt_tuning")


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_merge_and_unload_over_latent_attention_keeps_logits(switch: str, tmp_path: Path):
    conformance.test_merge_and_unload_keeps_logits(switch, "latent", tmp_path)


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_enable_recompute_over_latent_attention_keeps_gradients(switch: str):
    conformance.test_enable_recompute_keeps_gradients(switch, "latent")


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_kv_cache_decoding_over_latent_attention_matches_full_forward(switch: str):
    conformance.test_kv_cache_decoding_matches_full_forward(switch, "latent")


@pytest.mark.parametrize("switch", OF_PREFIXES)
def test_forward_with_prefix_over_latent_attention_matches_separate_rows(switch: str):
    conformance.test_forward_packed_documents_match_single_documents(switch, "latent")
    conformance.test_forward_answers_that_continue_one_prompt_match_separate_rows(switch, "latent")


@pytest.mark.parametrize("switch", OF_PREFIXES)
def test_from_pretrained_over_latent_attention_restores_the_same_bits(switch: str, tmp_path: Path):
    conformance.test_from_pretrained_restores_the_same_bits(switch, "latent", tmp_path)
