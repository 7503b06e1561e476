"""Requirements of every PEFT method over quantized experts, and over quantized latent attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext.peft.registry import PEFT_METHODS
from tests.peft import test_conformance_quantized as conformance

pytestmark = [
    pytest.mark.parametrize("switch", PEFT_METHODS.names()),
    pytest.mark.parametrize(("family", "algo"), [("experts", "nf4"), ("latent", "int8")]),
]


def test_merge_and_unload_over_quantized_family_keeps_logits(switch: str, family: str, algo: str):
    conformance.test_merge_and_unload_over_quantized_base_keeps_logits(switch, algo, family)


def test_from_files_over_quantized_family_restores_the_same_bits(switch: str, family: str, algo: str, tmp_path: Path):
    conformance.test_from_files_over_quantized_base_restores_the_same_bits(switch, algo, tmp_path, family)
