"""Compare LoRA with Hugging Face PEFT (tests/golden/generators/make_peft_golden.py)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.golden import DATA
from tests.golden.cases.peft_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY
from tests.peft.methods import golden_checks as shared

pytestmark = pytest.mark.parametrize("case", CASES)


def load(case: str) -> tuple[PeftModel, str, dict[str, np.ndarray]]:
    """Load PEFT's adapter on its base; return the model, the base's name and the golden results."""
    base, folder = CASES[case]["base"], DATA / "adapters" / case
    return PeftModel.from_pretrained(shared.base_model(base), folder), base, shared.golden_of(folder)


def trained_state(model: PeftModel) -> dict[str, paddle.Tensor]:
    """Return the adapter's tensors that train, by name; saved embeddings do not."""
    return {name: tensor for name, tensor in model.adapter_state().items() if not tensor.stop_gradient}


def stored_gradients(model: PeftModel) -> dict[str, paddle.Tensor]:
    """Return the gradients of the adapter's tensors, by the names and in the shapes of files."""
    return stored_form(model, {name: tensor.grad for name, tensor in trained_state(model).items()})


def stored_form(model: PeftModel, tensors: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Return tensors of an adapter as its file has them."""
    layout = model.config.file_layout
    return model.peft_config.to_stored({name: layout.to_transformers(name, each) for name, each in tensors.items()})


def difference_of_first_step(gradient: np.ndarray) -> np.ndarray:
    """Return how much the rounding of a parameter's first gradient can change the first step of AdamW, per element.

    The step is r g / (|g| + e) for the rate r and the epsilon e, so an error d of g changes it by at most
    r d e / (|g| - d + e)^2, or r d / e for |g| < d. The error d is 2^-24 sqrt(n) of the largest gradient, for random
    rounding errors of n terms: sums of up to 96 terms (the vocabulary) in about 30 ops, in both computations.
    A gradient of 0 has no error: the parameter belongs to an expert or a token that no row uses.
    """
    error = 2.0**-24 * math.sqrt(2 * 30 * 96) * np.abs(gradient).max() * (gradient != 0)
    smallest = np.maximum(np.abs(gradient) - error, 0)
    return LEARNING_RATE * error * EPSILON / (smallest + EPSILON) ** 2


def test_lora_peft_adapter_gives_peft_logits_gradients_and_merged_weights(case: str):
    model, base, golden = load(case)
    logits = model(shared.ids_of(base))
    shared.close(logits, golden["logits"])
    shared.check_loss_and_backward(model, base, golden)
    shared.check_tensors(stored_gradients(model), shared.part_of(golden, "gradient"))
    if CASES[case].get("merges", True):
        shared.check_merged(model, base, golden, logits.numpy())
    else:
        with pytest.raises(ValueError, match="load the adapter with the base model instead"):
            model.merge_and_unload()


def test_lora_adamw_and_lora_plus_steps_give_peft_weights(case: str):
    if CASES[case].get("ties_factors"):
        pytest.skip("PEFT trains the tied factors as two parameters")
    model, base, golden = load(case)
    model.train()
    model.peft_config.plus_scale = CASES[case].get("plus_ratio", 1.0)
    optimizer = shared.adamw(model, LEARNING_RATE, CASES[case].get("weight_decay", WEIGHT_DECAY), EPSILON)
    assert len(trainable_parameters(model)) == len(trained_state(model))
    shared.take_steps(optimizer, STEPS, lambda: shared.loss_of(model, base))
    ours, expected = stored_form(model, trained_state(model)), shared.part_of(golden, "trained")
    assert ours.keys() == expected.keys()
    for name, gradient in shared.part_of(golden, "gradient").items():
        difference = np.abs(ours[name].numpy() - expected[name])
        assert (difference <= shared.TOLERANCE + difference_of_first_step(gradient)).all(), name


def test_lora_peft_adapter_round_trips(case: str, tmp_path: Path):
    """Compare keys, bytes of tensors and fields of the config with PEFT's files."""
    load(case)[0].save_pretrained(tmp_path)
    shared.check_same_tensors(tmp_path, DATA / "adapters" / case)
    but = ("target_modules", "target_parameters")  # PEFT writes sets, in any order
    ours, theirs = shared.check_config_fields(tmp_path, DATA / "adapters" / case, but)
    assert set(ours["target_parameters"] or ()) == set(theirs["target_parameters"] or ())
