"""Interventions run by pyreft give the same numbers here (tests/golden/make_reft_golden.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.peft.layer import adapter_layers
from paddlenlp_ext.train.optim import build_optimizer

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
from model_cases import CASES as MODELS  # noqa: E402
from model_cases import make_inputs, make_weight  # noqa: E402
from reft_cases import CASES, EPSILON, LEARNING_RATE, PROMPT_LENGTHS, STEPS  # noqa: E402

TOLERANCE = 1e-5
PROMPTS = [[length] for length in PROMPT_LENGTHS]


def load(case: str) -> PeftModel:
    base = CASES[case]["base"]
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(base, name, tuple(parameter.shape)))
    return PeftModel.from_pretrained(model, GOLDEN / "reft" / case)


def loss_of(model: PeftModel, case: str) -> paddle.Tensor:
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(CASES[case]["base"]))
    hidden = model.hidden_states(input_ids, prompt_lengths=PROMPTS)
    loss_sum, _ = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight(), labels.flatten())
    return loss_sum / int((labels != -100).sum())


def close(ours: paddle.Tensor, golden: np.ndarray) -> None:
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_rotation(case: str):
    golden = np.load(GOLDEN / "reft" / case / "golden.npz")
    model = load(case)
    logits = model(paddle.to_tensor(make_inputs(CASES[case]["base"])[0]), prompt_lengths=PROMPTS)
    close(logits, golden["logits"])
    loss = loss_of(model, case)
    np.testing.assert_allclose(float(loss), golden["loss"], rtol=1e-6)
    loss.backward()
    state = model.adapter_state()
    for name in (name for name in golden if name.startswith("gradient:")):
        close(state[name.removeprefix("gradient:")].grad, golden[name])
    rotations = {f"rotation:{name.replace('.base', '')}": layer for name, layer in adapter_layers(model.base_model)}
    for name in (name for name in golden if name.startswith("rotation:")):
        close(rotations[name].intervention.basis.matrix(), golden[name])


@pytest.mark.parametrize("case", CASES)
def test_values_after_some_steps_of_adamw(case: str):
    golden = np.load(GOLDEN / "reft" / case / "golden.npz")
    model = load(case).train()
    options = SimpleNamespace(
        optim="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=EPSILON,
    )
    optimizer = build_optimizer(model, options)
    for _ in range(STEPS):
        loss_of(model, case).backward()
        optimizer.step()
        optimizer.clear_grad()
    trained = {name.removeprefix("trained:"): golden[name] for name in golden if name.startswith("trained:")}
    state = model.adapter_state()
    assert trained.keys() == {name for name in state if not name.endswith(".frame")}
    for name, value in trained.items():
        close(state[name], value)
