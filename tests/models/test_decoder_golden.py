"""Compare logits, loss and gradients of every family with transformers.

Reference: tests/golden/generators/make_model_golden.py.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.models.registry import FAMILIES
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_inputs, make_weight

TOLERANCE = 1e-5


def build(case: str) -> CausalLM:
    model = CausalLM(DecoderConfig.from_dict(CASES[case]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(case, name, tuple(parameter.shape)))
    return model


def test_golden_cases_cover_every_family():
    assert {settings["model_type"] for settings in CASES.values()} == set(FAMILIES.names())


@pytest.mark.parametrize("case", CASES)
def test_decoder_logits_loss_and_gradients_match_transformers(case: str):
    golden = np.load(DATA / "models" / f"{case}.npz")
    model = build(case)
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(case))

    logits = model(input_ids)
    np.testing.assert_allclose(logits.numpy(), golden["logits"], rtol=0, atol=TOLERANCE)

    hidden = model.hidden_states(input_ids).flatten(0, 1)
    loss_sum, _ = linear_cross_entropy(hidden, model.head_weight(), labels.flatten(), chunk=7)
    loss = loss_sum / int((labels != -100).sum())
    loss.backward()
    assert float(loss) == pytest.approx(float(golden["loss"]), rel=1e-6)

    parameters = dict(model.named_parameters())
    expected = {name.removeprefix("gradient:") for name in golden.files if name.startswith("gradient:")}
    assert set(parameters) == expected
    assert len(expected) >= 18
    for name in sorted(expected):
        gradient, golden_gradient = parameters[name].grad.numpy(), golden[f"gradient:{name}"]
        assert np.abs(golden_gradient).max() > 0, name
        np.testing.assert_allclose(gradient, golden_gradient, rtol=0, atol=TOLERANCE, err_msg=name)
