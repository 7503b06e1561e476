"""Interventions run by pyreft give the same numbers here (tests/golden/make_reft_golden.py)."""

from __future__ import annotations

import sys

import pytest
from golden_checks import (
    GOLDEN,
    adamw,
    base_model,
    check_gradients,
    check_loss_and_go_back,
    check_tensors,
    close,
    golden_of,
    ids_of,
    loss_of,
    part_of,
    take_steps,
)

from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.peft.layer import adapter_layers

sys.path.insert(0, str(GOLDEN))
from reft_cases import CASES, EPSILON, LEARNING_RATE, PROMPT_LENGTHS, STEPS

PROMPTS = [[length] for length in PROMPT_LENGTHS]


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(base_model(CASES[case]["base"]), GOLDEN / "reft" / case)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_rotation(case: str):
    golden, model, base = golden_of(GOLDEN / "reft" / case), load(case), CASES[case]["base"]
    close(model(ids_of(base), prompt_lengths=PROMPTS), golden["logits"])
    check_loss_and_go_back(model, base, golden, prompt_lengths=PROMPTS)
    state, gradients = model.adapter_state(), part_of(golden, "gradient")
    check_gradients({name: state[name] for name in gradients}, gradients)
    layers = {name.replace(".base", ""): layer for name, layer in adapter_layers(model.base_model)}
    for name, rotation in part_of(golden, "rotation").items():
        close(layers[name].intervention.basis.matrix(), rotation, name)


@pytest.mark.parametrize("case", CASES)
def test_values_after_some_steps_of_adamw(case: str):
    golden, model = golden_of(GOLDEN / "reft" / case), load(case).train()
    optimizer = adamw(model, LEARNING_RATE, 0.0, EPSILON)
    take_steps(optimizer, STEPS, lambda: loss_of(model, CASES[case]["base"], prompt_lengths=PROMPTS))
    values = {name: tensor for name, tensor in model.adapter_state().items() if not name.endswith(".frame")}
    check_tensors(values, part_of(golden, "trained"))
