"""Requirements of every PEFT method over latent attention and experts: those that these layers could break."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.peft import test_conformance as conformance

REQUIREMENTS = (
    conformance.test_get_peft_model_starts_as_base,
    conformance.test_training_changes_only_the_adapter,
    conformance.test_from_pretrained_restores_the_same_bits,
    conformance.test_merge_and_unload_keeps_logits,
    conformance.test_disable_adapter_gives_base_logits,
    conformance.test_enable_recompute_keeps_gradients,
    conformance.test_forward_packed_documents_match_single_documents,
    conformance.test_forward_answers_that_continue_one_prompt_match_separate_rows,
    conformance.test_kv_cache_decoding_matches_full_forward,
)


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_method_over_latent_attention_and_experts(requirement, switch: str, tmp_path: Path):
    """Check a model with a dense layer, and one with a router, experts and a shared expert."""
    folder = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(requirement).parameters else {}
    requirement(switch, "latent_experts", **folder)
