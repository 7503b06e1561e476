"""Requirements of every PEFT method over a model with experts, whose linear layers it adapts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.peft import test_conformance as conformance


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_merge_and_unload_over_experts_keeps_logits(switch: str, tmp_path: Path):
    conformance.test_merge_and_unload_keeps_logits(switch, "experts", tmp_path)


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_enable_recompute_over_experts_keeps_gradients(switch: str):
    conformance.test_enable_recompute_keeps_gradients(switch, "experts")


@pytest.mark.parametrize("switch", PEFT_METHODS.names())
def test_from_pretrained_over_experts_restores_the_same_bits(switch: str, tmp_path: Path):
    conformance.test_from_pretrained_restores_the_same_bits(switch, "experts", tmp_path)
