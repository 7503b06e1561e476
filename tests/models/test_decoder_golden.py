"""Compare logits, loss and gradients of every family with transformers.

Reference: tests/golden/generators/make_model_golden.py.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.registry import FAMILIES
from tests.common.golden import as_in_transformers, name_in_transformers, set_golden_weights
from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_inputs

TOLERANCE = 1e-5


def build(case: str) -> CausalLM:
    model = CausalLM(DecoderConfig.from_dict(CASES[case]))
    set_golden_weights(model, case)
    return model


def bound(expected: np.ndarray) -> float:
    """Return the largest accepted difference; float32 rounds in proportion to the values."""
    return TOLERANCE * max(1.0, float(np.abs(expected).max()))


def test_golden_cases_cover_every_family():
    without_class = {"qwen"}  # transformers has no class; see test_qwen.py
    assert {settings["model_type"] for settings in CASES.values()} == set(FAMILIES.names()) - without_class


@pytest.mark.parametrize("case", CASES)
def test_decoder_logits_loss_and_gradients_match_transformers(case: str):
    golden = np.load(DATA / "models" / f"{case}.npz")
    model = build(case)
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(case))

    logits = model(input_ids)
    np.testing.assert_allclose(logits.numpy(), golden["logits"], rtol=0, atol=bound(golden["logits"]))

    hidden = model.hidden_states(input_ids).flatten(0, 1)
    loss_sum, _ = model.cross_entropy(hidden, labels.flatten())
    loss = loss_sum / int((labels != -100).sum())
    if model.load_balance is not None and model.load_balance.loss is not None:
        loss = loss + model.load_balance.loss
    loss.backward()
    assert float(loss) == pytest.approx(float(golden["loss"]), rel=1e-6)

    parts = {name: parameter.grad for name, parameter in model.named_parameters() if not parameter.stop_gradient}
    kind, named = model.config.model_type, as_in_transformers(model, parts)
    gradients = {name_in_transformers(name, kind): as_lazy(tensor).read() for name, tensor in named.items()}
    expected = {name.removeprefix("gradient:") for name in golden.files if name.startswith("gradient:")}
    assert set(gradients) == expected
    assert len(expected) >= 14
    for name in sorted(expected):
        gradient, golden_gradient = gradients[name], golden[f"gradient:{name}"]
        assert np.abs(golden_gradient).max() > 0, name
        np.testing.assert_allclose(gradient, golden_gradient, rtol=0, atol=bound(golden_gradient), err_msg=name)


@pytest.mark.parametrize(
    ("case", "name", "idle"),
    [
        ("mixtral_idle_expert", "model.layers.1.mlp.experts.gate_up_proj", 3),
        ("ernie4_5_moe_idle_expert", "model.layers.1.mlp.experts.down_proj", 2),
    ],
)
def test_golden_cases_with_an_idle_expert_have_one(case: str, name: str, idle: int):
    gradient = np.load(DATA / "models" / f"{case}.npz")[f"gradient:{name}"]
    assert not gradient[idle].any() and np.delete(gradient, idle, axis=0).any(axis=(1, 2)).all()
