"""Compare ReFT with pyreft (tests/golden/generators/make_reft_golden.py)."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.peft_model import PeftModel
from tests.common.arrays import FLOAT32_ROUNDING
from tests.golden import DATA
from tests.golden.cases.reft_cases import CASES, EPSILON, LEARNING_RATE, PROMPT_LENGTHS, STEPS
from tests.peft.methods import golden_checks as shared

PROMPTS = [[length] for length in PROMPT_LENGTHS]


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(shared.base_model(CASES[case]["base"]), DATA / "reft" / case)


@pytest.mark.parametrize("case", CASES)
def test_reft_pyreft_adapter_gives_pyreft_logits_gradients_and_basis(case: str):
    golden, model, base = shared.golden_of(DATA / "reft" / case), load(case), CASES[case]["base"]
    shared.close(model(shared.ids_of(base), prompt_lengths=PROMPTS), golden["logits"])
    shared.check_loss_and_backward(model, base, golden, prompt_lengths=PROMPTS)
    state, gradients = model.adapter_state(), shared.part_of(golden, "gradient")
    shared.check_gradients({name: state[name] for name in gradients}, gradients)
    layers = {name.replace(".base", ""): layer for name, layer in adapter_layers(model.base_model)}
    for name, rotation in shared.part_of(golden, "rotation").items():
        shared.close(layers[name].intervention.basis.matrix(), rotation, name)


@pytest.mark.parametrize("case", CASES)
def test_reft_adamw_steps_give_pyreft_values(case: str):
    golden, model = shared.golden_of(DATA / "reft" / case), load(case).train()
    optimizer = shared.adamw(model, LEARNING_RATE, 0.0, EPSILON)
    shared.take_steps(optimizer, STEPS, lambda: shared.loss_of(model, CASES[case]["base"], prompt_lengths=PROMPTS))
    values = {name: tensor for name, tensor in model.adapter_state().items() if not name.endswith(".frame")}
    trained, gradients = shared.part_of(golden, "trained"), shared.part_of(golden, "gradient")
    assert values.keys() == trained.keys() == gradients.keys()
    for name, expected in trained.items():
        # AdamW divides a gradient by its magnitude plus EPSILON, and thereby also the rounding error of the gradient.
        gradient = np.abs(gradients[name])
        error = FLOAT32_ROUNDING * gradient.max() / (gradient + EPSILON)
        tolerance = shared.TOLERANCE + STEPS * LEARNING_RATE * np.minimum(error, 1)
        np.testing.assert_array_less(np.abs(values[name].numpy() - expected), tolerance, err_msg=name)
