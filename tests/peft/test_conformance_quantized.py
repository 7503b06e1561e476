"""Requirements of every PEFT method over quantized weights, tested for the registry.

The models have biases (qwen2), experts, latent attention, short convolutions, recurrences, or layer embeddings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from tests.common.adapters import CHANGES_LOGITS_AT_START, logits_of, same_bits, state_of
from tests.peft.adapted_case import (
    EVERY_METHOD,
    METHODS_OF_EXPERTS,
    TOLERANCE,
    Case,
    Method,
    base_logits,
    case_keys,
    num_quantizable,
    plain_base,
)

# PaddleNLP ignores some of these options over quantized weights without a warning.
METHODS = {
    **EVERY_METHOD,
    "rslora": Method("lora", {"rslora": True}),
    "lora_plus": Method("lora", {"plus_scale": 4.0}),
    "dora with dropout": Method("use_dora", {"dropout": 0.3}),
    "loftq in three steps": Method("loftq", {"iters": 3}),
}
BEFORE_QUANTIZING = ("pissa", "olora", "loftq", "loftq in three steps")
CASES = [
    *case_keys(METHODS, ["qwen2"], "nf4"),
    *case_keys(METHODS, ["qwen2_layer"], "int8"),
    *case_keys(METHODS_OF_EXPERTS, ["experts_layer"], "nf4"),
    *case_keys(EVERY_METHOD, ["latent_layer"], "int8"),
    *case_keys(
        {name: each for name, each in EVERY_METHOD.items() if name != "prefix_tuning"},
        ["convolutions", "gated_delta", "mamba2"],
        "nf4",
    ),
    *case_keys(
        {name: each for name, each in EVERY_METHOD.items() if name not in CHANGES_LOGITS_AT_START},
        ["layer_embeddings"],
        "nf4",
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Return a case; with this scope, pytest runs all tests of a case in turn, and then releases its models."""
    return Case(request.param)


def test_get_peft_model_over_quantized_base_starts_as_base_or_closer_to_original(case: Case):
    assert len(quantized_layers(case.started)) == num_quantizable(case.family)
    started, base, original = case.started_logits, base_logits(case.family, case.algo), base_logits(case.family)
    if case.name in BEFORE_QUANTIZING:
        assert 0 < np.abs(started - original).mean() < 0.95 * np.abs(base - original).mean()
    elif case.name not in CHANGES_LOGITS_AT_START:
        np.testing.assert_allclose(started, base, atol=TOLERANCE)


def test_training_over_quantized_base_changes_only_the_adapter(case: Case):
    """Compare a trained model with a new one, all of whose values depend on the seed only."""
    adapter = {id(tensor) for tensor in case.trained.adapter_state().values()}
    base = [name for name, tensor in case.trained.state_dict().items() if id(tensor) not in adapter]
    assert sum(name.endswith(".codes") for name in base) == num_quantizable(case.family)
    before, after = state_of(case.started), state_of(case.trained)
    assert same_bits({name: before.pop(name) for name in base}, {name: after.pop(name) for name in base})
    assert not same_bits(before, after)


def test_from_files_over_quantized_base_restores_the_same_bits(case: Case, tmp_path: Path):
    case.trained.save_pretrained(tmp_path)
    stored = read_adapter(tmp_path)
    loaded = PeftModel.from_files(case.base(stored.for_base(plain_base(case.family).config).config), stored)
    assert same_bits(state_of(case.trained), state_of(loaded))
    assert np.array_equal(logits_of(loaded), case.trained_logits)


def test_merge_and_unload_over_quantized_base_keeps_logits(case: Case):
    model = case.new_trained()
    if not model.peft_config.mergeable:
        with pytest.raises(ValueError, match="cannot be merged"):
            model.merge_and_unload()
        assert len(quantized_layers(model)) == num_quantizable(case.family)
        return
    merged = model.merge_and_unload()
    assert merged.state_dict().keys() == plain_base(case.family).state_dict().keys()
    assert not quantized_layers(merged)
    np.testing.assert_allclose(logits_of(merged), case.trained_logits, rtol=0, atol=case.tolerance)


def test_disable_adapter_over_quantized_base_gives_base_logits(case: Case):
    with case.trained.disable_adapter():
        assert np.array_equal(logits_of(case.trained), case.base_logits)
    assert np.array_equal(logits_of(case.trained), case.trained_logits)
